#pragma once

#include <sys/ioctl.h>

/// \file
/// The width of a terminal.

namespace terminal {

/// Columns of the terminal to which a file descriptor writes. \returns `otherwise` if it writes to no terminal, or to one with
/// fewer than `least` columns, as those that do not tell their width
inline int columns(int file, int least, int otherwise) {
  winsize size{};
  return ::ioctl(file, TIOCGWINSZ, &size) == 0 && size.ws_col >= least ? size.ws_col : otherwise;
}

}  // namespace terminal
