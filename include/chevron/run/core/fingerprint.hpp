#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

/// \file
/// 64-bit fingerprints of bytes.

namespace chevron::detail {

/// A number in 16 hexadecimal digits.
inline std::string hexadecimal(std::uint64_t number) {
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(number));
  return digits;
}

/// Computes the fingerprint of a sequence of bytes, however calls of `add` divide the sequence. A change of a single 8-byte
/// word always changes the fingerprint.
class byte_fingerprint {
 public:
  void add(void const* bytes, std::size_t count) {
    auto const* from = static_cast<unsigned char const*>(bytes);
    size_ += count;
    for (; filled_ > 0 && count > 0; --count) one(*from++);
    for (; count >= 8; count -= 8, from += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, from, 8);
      mix(word);
    }
    for (; count > 0; --count) one(*from++);
  }
  std::uint64_t value() const {
    byte_fingerprint end = *this;
    end.mix(end.word_);
    end.mix(size_);
    return end.hash_;
  }
  std::string text() const { return hexadecimal(value()); }

 private:
  void one(unsigned char byte) {
    word_ |= static_cast<std::uint64_t>(byte) << (8 * filled_);
    if (++filled_ < 8) return;
    mix(word_);
    word_ = 0;
    filled_ = 0;
  }
  void mix(std::uint64_t word) {
    hash_ = (hash_ ^ word) * 0x9e3779b97f4a7c15u;
    hash_ ^= hash_ >> 29;
  }

  std::uint64_t hash_ = 14695981039346656037u, word_ = 0, size_ = 0;
  int filled_ = 0;  // bytes in word_
};

}  // namespace chevron::detail
