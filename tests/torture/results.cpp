#include <cstdio>
#include <sstream>

#include "tortures.hpp"

namespace torture {

namespace {
constexpr char const* mark = "#result ";
}

std::string to_line(result const& r) {
  return mark + std::to_string(r.tried) + " " + std::to_string(r.refused) + " " + std::to_string(r.harmless) + " " +
         std::to_string(r.wrong) + " " + r.name + "\t" + r.note;
}

std::vector<result> results_in(std::string const& output) {
  std::vector<result> out;
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(mark)) continue;
    std::istringstream fields(line.substr(std::string(mark).size()));
    result r;
    fields >> r.tried >> r.refused >> r.harmless >> r.wrong;
    fields.get();
    std::getline(fields, r.name, '\t');
    std::getline(fields, r.note);
    out.push_back(r);
  }
  return out;
}

std::vector<result> results_of(std::string const& name, outcome const& of) {
  std::vector<result> out = results_in(of.output);
  std::istringstream lines(of.output);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(mark)) std::printf("%s\n", line.c_str());
  }
  if (of.code == 0 && !of.hangs && !out.empty()) return out;
  std::printf("FAILED: %s: %s, exit code %d\n", name.c_str(), of.hangs ? "it hangs" : "it did not come to its end", of.code);
  out.push_back({.name = name, .tried = 1, .wrong = 1, .note = ""});
  return out;
}

}  // namespace torture
