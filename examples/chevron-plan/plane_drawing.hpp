#pragma once

#include <array>
#include <string>
#include <vector>

#include <chevron/tools/show/svg_drawing.hpp>

/// \file
/// Parts of pictures whose marks lie in a plane of memory and time: colours, marks, names beside marks, the frame.

namespace plan_program {

/// Colours by class, in the reader's light or dark scheme.
inline constexpr char const* plane_style = R"(<style>
.sheet { fill: #ffffff; } .name { fill: #1f2630; stroke: #ffffff; stroke-width: 3; paint-order: stroke; } .ink { fill: #1f2630; } .soft { fill: #5b6472; } .grid { stroke: #e4e8ee; }
.beyond { fill: #f3f5f8; } .limit { stroke: #c0182b; } .limit-text { fill: #c0182b; } .halo { stroke: #ffffff; }
.bound { stroke: #8b94a3; fill: none; } .plain { fill: #3f74c8; } .again { fill: #cf7a22; } .found { fill: #467a26; }
@media (prefers-color-scheme: dark) {
.sheet { fill: #14181f; } .name { fill: #e6eaf0; stroke: #14181f; } .ink { fill: #e6eaf0; } .soft { fill: #98a2b1; } .grid { stroke: #262d38; }
.beyond { fill: #1b212b; } .limit { stroke: #ff6b78; } .limit-text { fill: #ff6b78; } .halo { stroke: #14181f; }
.bound { stroke: #6d7787; } .plain { fill: #6b9be0; } .again { fill: #eb9f4d; } .found { fill: #8dbf68; }
}
</style>
)";

/// A rectangle of the drawing.
struct area {
  double x = 0, y = 0, width = 0, height = 0;
  bool meets(area const& o) const { return x < o.x + o.width && o.x < x + width && y < o.y + o.height && o.y < y + height; }
};

/// A step for an axis in bytes: 1, 2, 4, 8 … of a unit.
inline double byte_step(double range, double most_marks) {
  double step = 1;
  while (range / step > most_marks) step *= 2;
  return step;
}

enum class mark_shape { circle, square, diamond };

/// A mark as an element that is still open: the caller adds attributes, `>`, its title and `end_of` the shape.
inline std::string mark_begin(mark_shape shape, double x, double y, double r) {
  auto const at = [](double v) { return chevron::show::detail::drawing::at(v); };
  if (shape == mark_shape::diamond)
    return "<polygon points=\"" + at(x) + "," + at(y - r) + " " + at(x + r) + "," + at(y) + " " + at(x) + "," + at(y + r) + " " +
           at(x - r) + "," + at(y) + "\"";
  if (shape == mark_shape::square)
    return "<rect x=\"" + at(x - r + 0.5) + "\" y=\"" + at(y - r + 0.5) + "\" width=\"" + at(2 * r - 1) + "\" height=\"" +
           at(2 * r - 1) + "\"";
  return "<circle cx=\"" + at(x) + "\" cy=\"" + at(y) + "\" r=\"" + at(r) + "\"";
}
inline char const* end_of(mark_shape shape) {
  return shape == mark_shape::diamond ? "</polygon>\n" : shape == mark_shape::square ? "</rect>\n" : "</circle>\n";
}

/// Finds a place for a name beside a mark that covers nothing of `taken`, inside the frame, and takes it. \returns whether one
/// was free
inline bool take_place(std::vector<area>& taken, area const& frame, double x, double y, double wide, area& place) {
  std::array<area, 8> const places{area{x + 9, y - 7, wide, 14},         area{x - 9 - wide, y - 7, wide, 14},
                                   area{x + 7, y - 22, wide, 14},        area{x + 7, y + 8, wide, 14},
                                   area{x - 7 - wide, y - 22, wide, 14}, area{x - 7 - wide, y + 8, wide, 14},
                                   area{x - wide / 2, y - 23, wide, 14}, area{x - wide / 2, y + 9, wide, 14}};
  for (area const& at : places) {
    bool free =
        at.x > frame.x && at.x + at.width < frame.x + frame.width && at.y > frame.y && at.y + at.height < frame.y + frame.height;
    for (area const& other : taken) free = free && !at.meets(other);
    if (!free) continue;
    taken.push_back(at);
    place = at;
    return true;
  }
  return false;
}

/// The beginning of a drawing of this size, up to its words' group, with a sheet behind. \param page whether a page embeds it
inline std::string plane_begin(std::string const& title, int width, int height, bool page) {
  std::string const w = std::to_string(width), h = std::to_string(height);
  return "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + w + " " + h + "\" role=\"img\"" +
         (page ? "" : " width=\"" + w + "\" height=\"" + h + "\"") + ">\n<title>" + chevron::show::xml_text(title) +
         "</title>\n" + plane_style +
         "<rect class=\"sheet\" width=\"100%\" height=\"100%\" rx=\"6\"/>\n"
         "<g font-family=\"system-ui, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif\" font-size=\"12\" "
         "class=\"soft\">\n";
}

/// A page around a drawing. \param width in rem
inline std::string plane_page(std::string const& title, std::string const& drawing, int width) {
  return "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" "
         "content=\"width=device-width\">\n"
         "<meta name=\"color-scheme\" content=\"light dark\">\n<title>" +
         chevron::show::xml_text(title) + "</title>\n<style>body { margin: 2rem auto; max-width: " + std::to_string(width) +
         "rem; background: #ffffff; } svg { width: 100%; height: auto; "
         "}\n"
         "@media (prefers-color-scheme: dark) { body { background: #14181f; } }</style>\n</head>\n<body>\n" +
         drawing + "</body>\n</html>\n";
}

}  // namespace plan_program
