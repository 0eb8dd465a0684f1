#include "pickle.hpp"

#include <bit>
#include <cstdint>
#include <unordered_map>
#include <variant>
#include <vector>

namespace plan_program {
namespace {

using nlohmann::json;

/// Names of pickletools for the opcodes that are refused.
char const* refused_name(unsigned char code) {
  switch (code) {
    case 'c':
      return "GLOBAL";
    case 0x93:
      return "STACK_GLOBAL";
    case 'R':
      return "REDUCE";
    case 'b':
      return "BUILD";
    case 'i':
      return "INST";
    case 'o':
      return "OBJ";
    case 0x81:
      return "NEWOBJ";
    case 0x92:
      return "NEWOBJ_EX";
    case 'P':
      return "PERSID";
    case 'Q':
      return "BINPERSID";
    case 0x82:
      return "EXT1";
    case 0x83:
      return "EXT2";
    case 0x84:
      return "EXT4";
    case 0x8f:
      return "EMPTY_SET";
    case 0x90:
      return "ADDITEMS";
    case 0x91:
      return "FROZENSET";
    case 0x96:
      return "BYTEARRAY8";
    case 0x97:
      return "NEXT_BUFFER";
    case 0x98:
      return "READONLY_BUFFER";
    case 'I':
      return "INT";
    case 'L':
      return "LONG";
    case 'F':
      return "FLOAT";
    case 'S':
      return "STRING";
    case 'V':
      return "UNICODE";
    case 'g':
      return "GET";
    case 'p':
      return "PUT";
    default:
      return nullptr;
  }
}

struct list {
  std::vector<std::size_t> of;
  bool tuple = false;
};
struct dictionary {
  std::vector<std::pair<std::size_t, std::size_t>> of;
};
using value = std::variant<std::nullptr_t, bool, std::int64_t, double, std::string_view, list, dictionary>;

class unpickler {
 public:
  unpickler(std::string_view bytes, pickle_limits const& limits) : bytes_(bytes), limits_(limits) {}

  json read() {
    while (!step()) {
    }
    if (at_ != bytes_.size()) fault("bytes follow STOP", at_);
    json out;
    expand(stack_.back(), out, 0);
    return out;
  }

 private:
  [[noreturn]] static void fault(std::string const& words, std::size_t at) {
    throw pickle_error(words + " at byte " + std::to_string(at));
  }

  std::string_view take(std::uint64_t count) {
    if (count > bytes_.size() - at_) {
      fault("the file ends inside " + std::to_string(count) + " bytes that the opcode at byte " + std::to_string(opcode_) +
                " announces, ",
            bytes_.size());
    }
    std::string_view const out = bytes_.substr(at_, static_cast<std::size_t>(count));
    at_ += static_cast<std::size_t>(count);
    return out;
  }
  std::uint64_t number(int width) {
    std::uint64_t out = 0;
    std::string_view const digits = take(static_cast<std::uint64_t>(width));
    for (std::size_t i = digits.size(); i-- > 0;) out = out << 8 | static_cast<unsigned char>(digits[i]);
    return out;
  }
  std::int64_t signed_number(std::uint64_t width) {
    if (width > 8) fault("an integer of " + std::to_string(width) + " bytes, more than 8,", opcode_);
    if (width == 0) return 0;
    std::uint64_t bits = number(static_cast<int>(width));
    if (width < 8 && (bits >> (8 * width - 1) & 1) != 0) bits |= ~std::uint64_t{0} << (8 * width);
    return static_cast<std::int64_t>(bits);
  }

  void push(value made) {
    stack_.push_back(values_.size());
    values_.push_back(std::move(made));
  }
  /// Values above the last mark, or above the bottom of the stack.
  std::size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  void need(std::size_t count) const {
    if (stack_.size() < floor() + count) fault("the stack is empty", opcode_);
  }
  std::size_t pop() {
    need(1);
    std::size_t const out = stack_.back();
    stack_.pop_back();
    return out;
  }
  std::vector<std::size_t> pop_to_mark() {
    if (marks_.empty()) fault("no MARK on the stack", opcode_);
    auto const from = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
    std::vector<std::size_t> out(from, stack_.end());
    stack_.erase(from, stack_.end());
    marks_.pop_back();
    return out;
  }
  void push_tuple(std::size_t count) {
    need(count);
    auto const from = stack_.end() - static_cast<std::ptrdiff_t>(count);
    list made{{from, stack_.end()}, true};
    stack_.erase(from, stack_.end());
    push(std::move(made));
  }
  list& top_list() {
    need(1);
    auto* const out = std::get_if<list>(&values_[stack_.back()]);
    if (out == nullptr || out->tuple) fault("items are appended to a value that is no list,", opcode_);
    return *out;
  }
  void set_items(std::vector<std::size_t> const& items) {
    need(1);
    auto* const into = std::get_if<dictionary>(&values_[stack_.back()]);
    if (into == nullptr) fault("items are set in a value that is no dictionary,", opcode_);
    if (items.size() % 2 != 0) fault("a key without a value", opcode_);
    for (std::size_t i = 0; i < items.size(); i += 2) into->of.emplace_back(items[i], items[i + 1]);
  }
  void remember(std::uint64_t index) {
    need(1);
    memo_[index] = stack_.back();
  }
  void recall(std::uint64_t index) {
    auto const found = memo_.find(index);
    if (found == memo_.end()) fault("memo entry " + std::to_string(index) + " is read before it is written,", opcode_);
    stack_.push_back(found->second);
  }

  /// Executes one opcode; true after STOP.
  bool step() {
    opcode_ = at_;
    if (at_ == bytes_.size()) fault("the file ends without STOP", at_);
    auto const code = static_cast<unsigned char>(bytes_[at_++]);
    if (opcode_ == 0 && code != 0x80) fault("the first opcode is not PROTO", 0);
    switch (code) {
      case 0x80:
        if (opcode_ != 0) fault("a second PROTO", opcode_);
        if (std::uint64_t const protocol = number(1); protocol < 2 || protocol > 5)
          fault("protocol " + std::to_string(protocol) + ", and 2 to 5 are read here,", opcode_);
        break;
      case 0x95:
        if (std::uint64_t const size = number(8); size > bytes_.size() - at_)
          fault("a FRAME of " + std::to_string(size) + " bytes goes beyond the file's end", opcode_);
        break;
      case '.':
        if (stack_.size() != 1 || !marks_.empty()) {
          fault("STOP with " + std::to_string(stack_.size()) + " values and " + std::to_string(marks_.size()) +
                    " marks on the stack, not one value",
                opcode_);
        }
        return true;
      case '(':
        marks_.push_back(stack_.size());
        break;
      case '0':
        pop();
        break;
      case '1':
        pop_to_mark();
        break;
      case '2':
        need(1);
        stack_.push_back(stack_.back());
        break;
      case 'N':
        push(nullptr);
        break;
      case 0x88:
        push(true);
        break;
      case 0x89:
        push(false);
        break;
      case 'J':
        push(signed_number(4));
        break;
      case 'K':
        push(static_cast<std::int64_t>(number(1)));
        break;
      case 'M':
        push(static_cast<std::int64_t>(number(2)));
        break;
      case 0x8a:
        push(signed_number(number(1)));
        break;
      case 0x8b:
        push(signed_number(number(4)));
        break;
      case 'G': {
        std::uint64_t bits = 0;
        for (char const c : take(8)) bits = bits << 8 | static_cast<unsigned char>(c);
        push(std::bit_cast<double>(bits));
        break;
      }
      case 'U':
      case 'C':
      case 0x8c:
        push(take(number(1)));
        break;
      case 'T':
      case 'B':
      case 'X':
        push(take(number(4)));
        break;
      case 0x8d:
      case 0x8e:
        push(take(number(8)));
        break;
      case ']':
        push(list{});
        break;
      case ')':
        push(list{{}, true});
        break;
      case '}':
        push(dictionary{});
        break;
      case 0x85:
        push_tuple(1);
        break;
      case 0x86:
        push_tuple(2);
        break;
      case 0x87:
        push_tuple(3);
        break;
      case 't':
        push(list{pop_to_mark(), true});
        break;
      case 'l':
        push(list{pop_to_mark(), false});
        break;
      case 'd': {
        std::vector<std::size_t> const items = pop_to_mark();
        push(dictionary{});
        set_items(items);
        break;
      }
      case 'a': {
        std::size_t const item = pop();
        top_list().of.push_back(item);
        break;
      }
      case 'e': {
        std::vector<std::size_t> const items = pop_to_mark();
        auto& into = top_list().of;
        into.insert(into.end(), items.begin(), items.end());
        break;
      }
      case 's': {
        std::size_t const second = pop(), first = pop();
        set_items({first, second});
        break;
      }
      case 'u':
        set_items(pop_to_mark());
        break;
      case 'q':
        remember(number(1));
        break;
      case 'r':
        remember(number(4));
        break;
      case 0x94:
        remember(memo_.size());
        break;
      case 'h':
        recall(number(1));
        break;
      case 'j':
        recall(number(4));
        break;
      default: {
        char const* const name = refused_name(code);
        fault("opcode " + (name != nullptr ? std::string(name) : "number " + std::to_string(int{code})) +
                  " is not one of plain data,",
              opcode_);
      }
    }
    return false;
  }

  /// Writes a value into `out`, which is counted before it exists.
  void expand(std::size_t index, json& out, int depth) {
    if (++expanded_ > limits_.values) fault("more than " + std::to_string(limits_.values) + " values,", bytes_.size());
    if (depth > limits_.depth)
      fault("values inside each other deeper than " + std::to_string(limits_.depth) + ",", bytes_.size());
    value const& from = values_[index];
    if (auto const* yes = std::get_if<bool>(&from))
      out = *yes;
    else if (auto const* whole = std::get_if<std::int64_t>(&from))
      out = *whole;
    else if (auto const* real = std::get_if<double>(&from))
      out = *real;
    else if (auto const* text = std::get_if<std::string_view>(&from))
      out = std::string(counted(*text));
    else if (auto const* items = std::get_if<list>(&from)) {
      out = json::array();
      for (std::size_t const item : items->of) {
        out.emplace_back();
        expand(item, out.back(), depth + 1);
      }
    } else if (auto const* pairs = std::get_if<dictionary>(&from)) {
      out = json::object();
      for (auto const& [key, item] : pairs->of) {
        std::string name;
        if (auto const* words = std::get_if<std::string_view>(&values_[key]))
          name = counted(*words);
        else if (auto const* number = std::get_if<std::int64_t>(&values_[key]))
          name = std::to_string(*number);
        else
          fault("a key of a dictionary is neither a text nor an integer,", bytes_.size());
        expand(item, out[name], depth + 1);
      }
    }
  }
  std::string_view counted(std::string_view text) {
    text_bytes_ += text.size();
    if (text_bytes_ > limits_.text_bytes)
      fault("texts of more than " + std::to_string(limits_.text_bytes) + " bytes,", bytes_.size());
    return text;
  }

  std::string_view bytes_;
  pickle_limits limits_;
  std::size_t at_ = 0, opcode_ = 0;
  std::size_t expanded_ = 0, text_bytes_ = 0;
  std::vector<value> values_;
  std::vector<std::size_t> stack_, marks_;
  std::unordered_map<std::uint64_t, std::size_t> memo_;
};

}  // namespace

nlohmann::json read_pickle(std::string_view bytes, pickle_limits const& limits) { return unpickler(bytes, limits).read(); }

}  // namespace plan_program
