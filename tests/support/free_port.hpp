#pragma once

// A TCP port for the ranks of a test.

#include <cstdio>
#include <memory>
#include <string>

#include <doctest/doctest.h>

/// \returns a port that no process listens on and that no other test was given (free_port.sh)
inline std::string free_port() {
  std::string const here = __FILE__;
  std::string const command = "sh -c '. \"" + here.substr(0, here.rfind('.')) + ".sh\"; free_port'";
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> const out(::popen(command.c_str(), "r"), ::pclose);
  REQUIRE(out != nullptr);
  char number[16] = "";
  REQUIRE(std::fgets(number, sizeof number, out.get()) != nullptr);
  return std::to_string(std::stoi(number));
}
