#pragma once

#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

/// \file
/// Event files of TensorBoard: TFRecords that hold messages `Event` of protocol buffers.

namespace chevron::train {

namespace event_format {

/// CRC-32C (Castagnoli), reflected, as RFC 3720 section 12.1 defines it.
constexpr std::uint32_t crc32c(std::string_view bytes) {
  constexpr auto table = [] {
    std::array<std::uint32_t, 256> out{};
    for (std::uint32_t i = 0; i < 256; ++i) {
      std::uint32_t remainder = i;
      for (int bit = 0; bit < 8; ++bit) remainder = (remainder >> 1) ^ (remainder % 2 == 1 ? 0x82f63b78u : 0u);
      out[i] = remainder;
    }
    return out;
  }();
  std::uint32_t sum = 0xffffffffu;
  for (char const c : bytes) sum = (sum >> 8) ^ table[(sum ^ static_cast<std::uint8_t>(c)) & 0xffu];
  return ~sum;
}

/// The checksum as records store it: rotated and shifted by a constant, since a checksum of bytes that hold their own checksum
/// says little.
constexpr std::uint32_t masked_crc32c(std::string_view bytes) { return std::rotr(crc32c(bytes), 15) + 0xa282ead8u; }

/// A number of `Bytes` bytes, the lowest byte first.
template <int Bytes>
std::string little_endian(std::uint64_t value) {
  std::string out;
  for (int i = 0; i < Bytes; ++i) out += static_cast<char>(value >> (8 * i) & 0xff);
  return out;
}

/// A TFRecord: length, its checksum, the content, its checksum.
inline std::string record(std::string const& content) {
  std::string const length = little_endian<8>(content.size());
  return length + little_endian<4>(masked_crc32c(length)) + content + little_endian<4>(masked_crc32c(content));
}

/// A number of protocol buffers in groups of seven bits.
inline std::string varint(std::uint64_t value) {
  std::string out;
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  return out + static_cast<char>(value);
}

/// How a field's content is stored in a message.
enum class wire : std::uint64_t { number = 0, eight_bytes = 1, text = 2, four_bytes = 5 };
inline std::string tag(std::uint64_t field, wire type) { return varint(field << 3 | static_cast<std::uint64_t>(type)); }
inline std::string number_field(std::uint64_t field, std::int64_t value) {
  return tag(field, wire::number) + varint(static_cast<std::uint64_t>(value));
}
inline std::string text_field(std::uint64_t field, std::string const& content) {
  return tag(field, wire::text) + varint(content.size()) + content;
}
inline std::string double_field(std::uint64_t field, double value) {
  return tag(field, wire::eight_bytes) + little_endian<8>(std::bit_cast<std::uint64_t>(value));
}
inline std::string float_field(std::uint64_t field, float value) {
  return tag(field, wire::four_bytes) + little_endian<4>(std::bit_cast<std::uint32_t>(value));
}

}  // namespace event_format

/// The figures of a step, by name.
using named_figures = std::vector<std::pair<std::string, double>>;

/// The first message of each file (tensorflow/core/util/event.proto, `Event::file_version`). \param seconds since 1970
inline std::string version_event(double seconds) {
  return event_format::double_field(1, seconds) + event_format::text_field(3, "brain.Event:2");
}

/// A message that a run begins at a step: readers then drop figures of this step and later ones that earlier files have
/// (`Event::session_log`, with `SessionLog::START`). \param seconds since 1970 \param step with which the run goes on
inline std::string start_event(double seconds, std::int64_t step) {
  return event_format::double_field(1, seconds) + event_format::number_field(2, step) +
         event_format::text_field(7, event_format::number_field(1, 1));
}

/// A message with the figures of a step (`Event::summary`, a `Summary::Value` for each figure). \param seconds since 1970
inline std::string summary_event(double seconds, std::int64_t step, named_figures const& figures) {
  std::string summary;
  for (auto const& [name, value] : figures)
    summary +=
        event_format::text_field(1, event_format::text_field(1, name) + event_format::float_field(2, static_cast<float>(value)));
  return event_format::double_field(1, seconds) + event_format::number_field(2, step) + event_format::text_field(5, summary);
}

/// A new event file in a folder, for one run. Its name has time, machine and process, so that no file is replaced; TensorBoard
/// reads a folder's files in the order of their names.
class event_file {
 public:
  /// Creates the folder if it is missing, and the file. \param first_step with which the run begins or goes on
  /// \throws std::system_error if folder or file cannot be created
  event_file(std::filesystem::path const& folder, std::int64_t first_step) {
    std::filesystem::create_directories(folder);
    std::array<char, 256> machine{};
    if (::gethostname(machine.data(), machine.size() - 1) != 0) machine = {'-'};
    double const begin = now();
    std::string const name = "events.out.tfevents." + std::to_string(static_cast<std::int64_t>(begin)) + "." + machine.data() +
                             "." + std::to_string(::getpid());
    for (int n = 0; file_ == nullptr; ++n) {
      path_ = folder / (name + "." + std::to_string(n));
      file_ = std::fopen(path_.c_str(), "wbxe");
      if (file_ == nullptr && errno != EEXIST) throw std::system_error(errno, std::generic_category());
    }
    write(version_event(begin));
    write(start_event(begin, first_step));
  }
  event_file(event_file const&) = delete;
  event_file& operator=(event_file const&) = delete;
  ~event_file() {
    if (file_ != nullptr) std::fclose(file_);
  }

  std::filesystem::path const& path() const { return path_; }

  /// Appends the figures of a step, so that a reader finds them at once. If that fails, training is worth more than its figures:
  /// says so on standard error, and writes no more.
  void add(std::int64_t step, named_figures const& figures) {
    if (file_ == nullptr || (write(summary_event(now(), step, figures)) && std::fflush(file_) == 0)) return;
    std::fprintf(stderr, "--tensorboard: %s cannot be written from step %lld on: %s\n", path_.c_str(),
                 static_cast<long long>(step), std::generic_category().message(errno).c_str());
    std::fclose(file_);
    file_ = nullptr;
  }

 private:
  static double now() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }
  bool write(std::string const& event) {
    std::string const bytes = event_format::record(event);
    return std::fwrite(bytes.data(), 1, bytes.size(), file_) == bytes.size();
  }

  std::filesystem::path path_;
  std::FILE* file_ = nullptr;
};

}  // namespace chevron::train
