#pragma once

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

/// \file
/// Whole files as text.

inline std::string content_of(std::filesystem::path const& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

inline void write_content(std::filesystem::path const& file, std::string const& content) {
  std::ofstream(file, std::ios::binary | std::ios::trunc) << content;
}
