#pragma once

// A device that is not there: LibTorch's PrivateUse1, under the name "accel", with streams, events, memory and generators as a
// GPU has them. Operators compute on the CPU, at once; when they would have run is kept in clocks (clocks.hpp).

#include <string>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "accelerator/clocks.hpp"

namespace accelerator {

inline constexpr int device_count = 8;

inline at::Device device(int index) { return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index)}; }

/// Registers all of it with LibTorch. Once in a process, before anything else.
void install();

/// Everything is as at the beginning. No tensor of a device may be left.
/// \param late from now on operators run late (late.hpp)
/// \returns how many blocks of memory were left
int start_over(bool late = false);

/// From now on whatever waits for an event throws, or no longer.
void lose_device(bool is_lost);

/// How many events have been made since the process began.
long events_made();

/// Of this thread.
int current_device();
int current_stream(int device);

/// Streams by the numbers that clocks know; a device's default stream has the number of the device.
int number_of(c10::Stream stream);
c10::Stream stream_of(int device, int number);

/// The same values in main memory, at the same address.
at::Tensor alias_on_cpu(at::Tensor const& t);
/// The values that streams see that run late.
at::Tensor late_alias(at::Tensor const& t);
/// The bytes that a tensor lies in.
touched part_of(at::Tensor const& t, bool writes);

/// Makes the host wait for all enqueued work of a stream.
void host_waits_for(int device, int stream);

/// The generator of a device; counts the operators that drew.
at::Generator const& generator_of(int device);
/// The generator in main memory that takes its place in an operator; the offset moves on.
at::Generator draw_from(at::Generator const& of_device);

}  // namespace accelerator
