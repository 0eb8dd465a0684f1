#pragma once

#include <string>

/// \file
/// Pictures in formats for which another program is asked.

namespace plan_program {

/// Converts an SVG by rsvg-convert, Inkscape or Chromium, the first of them on the path. A PNG has two pixels for each of the
/// SVG's, on each side; a PDF has one page of the SVG's size.
/// \param width of the SVG, in pixels \param height of the SVG, in pixels \param format `png` or `pdf`
/// \returns the bytes of the file
/// \throws usage if none of the programs is installed, or if it fails
std::string converted_picture(std::string const& svg, double width, double height, std::string const& format);

}  // namespace plan_program
