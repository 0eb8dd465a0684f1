// timeout: 300
#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <chevron/csv/csv.hpp>
#include <chevron/csv/csv_check.hpp>
#include <chevron/lower/lower.hpp>

#include "unit/tools/show/show_support.hpp"

using namespace chevron;
using show_test::split;

namespace {

/// One small change to a text: of characters as a slip of a finger makes them, or of whole cells as a wrong program does.
std::string mutated(std::string csv, std::mt19937& random) {
  auto const below = [&](std::size_t n) { return n == 0 ? std::size_t{0} : std::size_t{random() % n}; };
  static constexpr std::string_view letters("0123456789FBIWSENDRCVUG_OLAP,,,\n\r();  \t\"\"\0x\xff", 44);
  switch (below(9)) {
    case 0:
      csv[below(csv.size())] = letters[below(letters.size())];
      break;
    case 1:
      csv.insert(below(csv.size() + 1), 1, letters[below(letters.size())]);
      break;
    case 2:
      csv.erase(below(csv.size()), 1 + below(4));
      break;
    case 3:
      csv.resize(below(csv.size() + 1));
      break;
    case 4: {  // a digit becomes another: renumbered
      std::size_t const from = below(csv.size());
      for (std::size_t i = 0; i < csv.size(); ++i) {
        char& c = csv[(from + i) % csv.size()];
        if (c < '0' || c > '9') continue;
        c = static_cast<char>('0' + below(10));
        break;
      }
      break;
    }
    case 5: {  // of a pair: halves swapped, taken apart, put into another
      std::size_t const open = csv.find('(', below(csv.size()));
      std::size_t const middle = csv.find(';', open), close = csv.find(')', middle);
      std::string const end = ")OVERLAP_F_B";
      if (close == std::string::npos || csv.substr(close, end.size()) != end) break;
      std::string const first = csv.substr(open + 1, middle - open - 1), second = csv.substr(middle + 1, close - middle - 1);
      std::string const whole = "(" + first + ";" + second + end;
      std::string const instead[] = {"(" + second + ";" + first + end,
                                     first + "," + second,
                                     second + "," + first,
                                     "(" + whole + ";" + second + end,
                                     "(" + first + ";" + whole + end,
                                     "(" + first + end + ",(" + second + end};
      csv.replace(open, whole.size(), instead[below(6)]);
      break;
    }
    default: {
      std::vector<std::string> rows = split(csv, '\n');
      std::vector<std::string> cells = split(rows[below(rows.size())], ',');
      std::string const before = [&] {
        std::string joined;
        for (std::size_t i = 0; i < cells.size(); ++i) joined += (i > 0 ? "," : "") + cells[i];
        return joined;
      }();
      std::size_t const a = below(cells.size()), b = below(cells.size());
      switch (below(5)) {
        case 4: {  // two neighbours become a pair
          if (a + 1 == cells.size()) break;
          bool const forward_first = cells[a].find('F') != std::string::npos;
          cells[a] = "(" + cells[forward_first ? a : a + 1] + ";" + cells[forward_first ? a + 1 : a] + ")OVERLAP_F_B";
          cells.erase(cells.begin() + static_cast<std::ptrdiff_t>(a) + 1);
          break;
        }
        case 0:
          std::swap(cells[a], cells[b]);
          break;
        case 1:
          cells[a] = cells[b];
          break;
        case 2:
          cells.erase(cells.begin() + static_cast<std::ptrdiff_t>(a));
          break;
        default:
          cells.insert(cells.begin() + static_cast<std::ptrdiff_t>(a), "");
          break;
      }
      std::string after;
      for (std::size_t i = 0; i < cells.size(); ++i) after += (i > 0 ? "," : "") + cells[i];
      std::size_t const at = csv.find(before);
      if (at != std::string::npos) csv.replace(at, before.size(), after);
      break;
    }
  }
  return csv;
}

/// A text without its meaningless parts: idle cells, blanks and quotes, carriage returns, ends of last lines.
std::string normalised(std::string csv) {
  std::string out;
  std::erase_if(csv, [](char c) { return c == ' ' || c == '\t' || c == '"'; });
  while (csv.ends_with('\n') || csv.ends_with('\r')) csv.pop_back();
  for (std::string row : split(csv, '\n')) {
    if (row.ends_with('\r')) row.pop_back();
    std::string kept;
    for (std::string const& cell : split(row, ',')) kept += cell.empty() ? "" : (kept.empty() ? "" : ",") + cell;
    out += kept + "\n";
  }
  return out;
}

}  // namespace

TEST_SUITE("csv fuzz") {
  TEST_CASE("20,000 changed texts: refused with a place, or exactly what they say") {
    std::vector<std::string> valid;
    for (shape size : {shape{1, 2, 0}, shape{2, 4, 0}, shape{3, 5, 0}, shape{4, 8, 0}}) {
      catalogue::for_each([&](auto const& one) {
        plan const p = expand(one, size);
        if (p.problem) return;
        valid.push_back(show::csv(p));
        valid.push_back(show::csv(p, show::idle_cells::written));
        owned_program const made = lower(prove(p)).copy();
        valid.push_back(show::csv_with_communication(made, show::csv_waits::left_out));
        valid.push_back(show::csv_with_communication(made, show::csv_waits::written));
      });
    }
    REQUIRE(valid.size() > 60);
    std::mt19937 random(20261121);
    int refused = 0, broken = 0, legal = 0, lowered = 0, differing = 0, repaired = 0;
    for (int i = 0; i < 20000; ++i) {
      std::string const& from = valid[random() % valid.size()];
      std::string csv = from;
      for (auto changes = 1 + random() % 3; changes > 0 && !csv.empty(); --changes) csv = mutated(csv, random);
      csv_schedule const read = read_csv(csv);
      finding const f = check(read, csv);
      if (f) {
        // Wherever it is, the place is one in the text, and there is a sentence for it.
        csv_place const at = place_of(f, csv, !check(read.plan.view()));
        std::vector<std::string> const rows = split(csv, '\n');
        bool const inside = at.line >= 1 && at.line <= static_cast<int>(rows.size()) && at.column >= 1 &&
                            at.column <= static_cast<int>(rows[static_cast<std::size_t>(at.line) - 1].size()) + 1;
        if (!inside || describe(f, read, csv).empty()) {
          CAPTURE(csv);
          CAPTURE(describe(f, read, csv));
          CHECK(inside);
        }
        ++(f.broken == law::description ? refused : broken);
        continue;
      }
      ++legal;
      // Accepted text is read completely: no cell is dropped or read as another action.
      std::string again = show::csv(read.plan);
      if (read.dialect != csv_dialect::compute_only) {
        ++lowered;
        again.clear();
        program_view const file = read.program.view();
        std::string const wanted = normalised(csv);
        for (int r = 0; r < file.plan.size.ranks; ++r) {
          std::vector<std::string> const row = split(split(wanted, '\n')[static_cast<std::size_t>(r)], ',');
          int at = 0;
          for (std::size_t c = 0; c < row.size(); ++c) {
            again += c > 0 ? "," : "";
            if (row[c].ends_with("WAIT_REDUCE_GRAD")) {
              again += row[c];
              continue;
            }
            action const one = file.at(r, at++).op;
            again += one.fused != 0 ? to_text(fused_pair{one, file.at(r, at++).op}).str() : to_text(one).str();
          }
          CHECK(at == file.length(r));
          again += "\n";
        }
      }
      CHECK(again == normalised(csv));
      if (normalised(csv) != normalised(from)) {
        ++differing;
        auto const pairs = [](std::string const& text) { return std::count(text.begin(), text.end(), '('); };
        if (pairs(csv) != pairs(from)) ++repaired;
      }
      // A lawful plan lowers to a program that keeps all laws.
      owned_program const made = lower(prove(read.plan)).copy();
      finding const after = check(made);
      if (after) {
        CAPTURE(csv);
        CHECK(describe(after).str() == "all laws hold");
      }
    }
    MESSAGE("unreadable " << refused << ", broken laws " << broken << ", legal " << legal << " (" << lowered
                          << " with communication, " << differing << " other than before, " << repaired
                          << " with more pairs or fewer)");
    // The test is about something only if each of these happens.
    CHECK(refused > 2000);
    CHECK(broken > 2000);
    CHECK(legal > 200);
    CHECK(lowered > 20);
    CHECK(differing > 50);
    CHECK(repaired > 20);
  }
}
