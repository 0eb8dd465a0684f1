#pragma once

#include <cstddef>

/// \file
/// Allocates arrays, while compiling and at run time.

namespace chevron {

/// The length to declare for an array of `elements` elements: at least 1, since C++ has no empty arrays.
constexpr std::size_t array_size(int elements) { return elements > 0 ? static_cast<std::size_t>(elements) : 1; }

/// The type of `zeroed`, an argument with which `buffer` zeroes its elements.
struct zeroed_t {};
inline constexpr zeroed_t zeroed{};

/// Owns an array of `count` elements, which are initialised only by `zeroed` or by values: zeroing an element costs GCC 12's
/// constant evaluator as much as computing the element. (To the evaluator, a read of an uninitialised element is an error, so
/// compile-time tests would find such a read.) Inner loops copy `data` into a local pointer, since a call of an accessor costs
/// the evaluator as much as the work itself.
template <class Element>
struct buffer {
  Element* data = nullptr;
  int count = 0;

  constexpr buffer() = default;
  constexpr explicit buffer(int n) : data(new Element[static_cast<unsigned>(n > 0 ? n : 1)]), count(n) {}
  constexpr buffer(int n, Element const& each) : buffer(n) {
    for (int i = 0; i < n; ++i) data[i] = each;
  }
  /// Copies `n` elements of `from`.
  constexpr buffer(Element const* from, int n) : buffer(n) {
    for (int i = 0; i < n; ++i) data[i] = from[i];
  }
  /// Copies the elements of a contiguous container of the standard library.
  template <class Container>
  requires requires(Container const& from) {
    static_cast<int>(from.size());
    from.data()[0];
  }
  constexpr buffer(Container const& from) : buffer(from.data(), static_cast<int>(from.size())) {}
  constexpr buffer(int n, zeroed_t) : data(new Element[static_cast<unsigned>(n > 0 ? n : 1)]{}), count(n) {}
  constexpr buffer(buffer&& other) noexcept : data(other.data), count(other.count) {
    other.data = nullptr;
    other.count = 0;
  }
  constexpr buffer& operator=(buffer&& other) noexcept {
    if (this != &other) {
      delete[] data;
      data = other.data;
      count = other.count;
      other.data = nullptr;
      other.count = 0;
    }
    return *this;
  }
  constexpr buffer(buffer const& other) : buffer() {
    if (other.data != nullptr) *this = buffer(other.data, other.count);
  }
  constexpr buffer& operator=(buffer const& other) {
    if (this != &other) *this = buffer(other);
    return *this;
  }
  constexpr ~buffer() { delete[] data; }

  constexpr bool empty() const { return count == 0; }
  template <class Index>
  constexpr Element& operator[](Index i) const {
    return data[i];
  }
  constexpr Element* begin() const { return data; }
  constexpr Element* end() const { return data + count; }
};

}  // namespace chevron
