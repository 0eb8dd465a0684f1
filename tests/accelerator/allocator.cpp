#include "accelerator/allocator.hpp"

#include <cstdlib>
#include <cstring>

#include "accelerator/device.hpp"
#include "accelerator/late.hpp"

namespace accelerator {

namespace {

constexpr auto all = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);

/// Few sizes, so that all small tensors get each other's memory.
std::size_t size_class(std::size_t bytes) {
  std::size_t size = 4096;
  while (size < bytes) size *= 4;
  return size;
}

/// Waits for all enqueued work of the streams, messages included, as cudaFree does.
void wait_for_all_of(int device) {
  auto& late = late_streams::instance();
  if (!late.on()) return;
  for (int const stream : detector::instance().streams_of(device)) late.run_to(late.now(stream));
}

}  // namespace

device_allocator& device_allocator::instance() {
  static device_allocator& one = *new device_allocator;  // tensors may outlive all else
  return one;
}

c10::DataPtr device_allocator::allocate(std::size_t bytes) {
  int const device = current_device();
  c10::Device const where(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device));
  if (bytes == 0) return {nullptr, nullptr, &release, where};
  int const stream = current_stream(device);
  std::size_t const size = size_class(bytes);
  std::unique_lock hold(mutex_);
  block* b = take(freed_[{stream, size}], stream);
  if (b == nullptr) {
    use& u = uses_[device];
    auto const more = static_cast<std::int64_t>(size);
    if (u.reserved + more > limit_) {
      ++u.retries;
      hold.unlock();
      wait_for_all_of(device);
      hold.lock();
      give_back(device);
      TORCH_CHECK(u.reserved + more <= limit_, "out of memory");
    }
    auto made = std::make_unique<block>();
    b = made.get();
    b->memory = static_cast<char*>(std::aligned_alloc(64, size));
    b->late = static_cast<char*>(std::aligned_alloc(64, size));
    std::memset(b->memory, 0xff, size);
    std::memset(b->late, 0xff, size);
    b->size = size;
    b->device = device;
    b->stream = stream;
    blocks_[b->memory] = std::move(made);
    u.reserved += more;
  }
  b->given_out = true;
  ++b->history.owner;
  use& u = uses_[device];
  u.now += static_cast<std::int64_t>(size);
  u.peak = std::max(u.peak, u.now);
  return {b->memory, b, &release, where};
}

block* device_allocator::take(freed& from, int stream) {
  auto& known = detector::instance();
  std::erase_if(from.recorded, [&](block* b) {
    for (auto const& [other, number] : b->comes_before) {
      if (!known.follows(stream, other, number)) return false;
    }
    b->comes_before.clear();
    from.free.push_back(b);
    return true;
  });
  if (from.free.empty()) return nullptr;
  auto chosen = from.free.end() - 1;
  for (auto it = from.free.begin(); it != from.free.end(); ++it) {
    if (!known.follows_all(stream, (*it)->history)) chosen = it;
  }
  block* const b = *chosen;
  from.free.erase(chosen);
  spoil(*b);
  return b;
}

/// Fills newly allocated memory with NaNs, at the present point of its stream.
void device_allocator::spoil(block& b) {
  std::memset(b.memory, 0xff, b.size);
  if (late_streams::instance().on()) late_streams::instance().add(b.stream, [&b] { std::memset(b.late, 0xff, b.size); });
}

void device_allocator::free(block& b) {
  std::lock_guard const hold(mutex_);
  b.given_out = false;
  uses_[b.device].now -= static_cast<std::int64_t>(b.size);
  for (int const stream : b.recorded) b.comes_before.emplace_back(stream, detector::instance().now(stream).at(stream));
  b.recorded.clear();
  auto& of = freed_[{b.stream, b.size}];
  if (b.comes_before.empty()) {
    of.free.push_back(&b);
  } else {
    of.recorded.push_back(&b);
  }
}

void device_allocator::give_back(int device) {
  for (auto& [place, of] : freed_) {
    for (block* const b : of.free) {
      if (b->device == device) uses_[device].reserved -= static_cast<std::int64_t>(b->size);
    }
    std::erase_if(of.free, [&](block* b) { return b->device == device; });
  }
}

void device_allocator::emptyCache(c10::MempoolId_t) {
  std::lock_guard const hold(mutex_);
  for (auto const& [device, of] : uses_) give_back(device);
}

void device_allocator::limit(std::int64_t bytes) {
  std::lock_guard const hold(mutex_);
  limit_ = bytes;
}

std::pair<std::size_t, std::size_t> device_allocator::getMemoryInfo(c10::DeviceIndex device) {
  std::lock_guard const hold(mutex_);
  return {static_cast<std::size_t>(limit_ - uses_[device].reserved), static_cast<std::size_t>(limit_)};
}

void device_allocator::release(void* context) {
  if (context != nullptr) instance().free(*static_cast<block*>(context));
}

c10::DeleterFnPtr device_allocator::raw_deleter() const { return nullptr; }  // the pointer alone does not say which block

void device_allocator::copy_data(void* to, void const* from, std::size_t bytes) const { std::memcpy(to, from, bytes); }

void device_allocator::recordStream(c10::DataPtr const& of, c10::Stream stream) {
  auto* const b = static_cast<block*>(of.get_context());
  if (b == nullptr || of.get_deleter() != &release) return;
  int const number = number_of(stream);
  std::lock_guard const hold(mutex_);
  if (number != b->stream && std::find(b->recorded.begin(), b->recorded.end(), number) == b->recorded.end())
    b->recorded.push_back(number);
}

c10::CachingDeviceAllocator::DeviceStats device_allocator::getDeviceStats(c10::DeviceIndex device) {
  std::lock_guard const hold(mutex_);
  use const& u = uses_[device];
  c10::CachingDeviceAllocator::DeviceStats out;
  out.allocated_bytes[all].current = out.active_bytes[all].current = u.now;
  out.allocated_bytes[all].peak = out.active_bytes[all].peak = u.peak;
  out.num_alloc_retries = u.retries;
  out.reserved_bytes[all].current = out.reserved_bytes[all].peak = u.reserved;
  return out;
}

void device_allocator::resetPeakStats(c10::DeviceIndex device) {
  std::lock_guard const hold(mutex_);
  uses_[device].peak = uses_[device].now;
}

block* device_allocator::find(void const* address) {
  std::lock_guard const hold(mutex_);
  auto const after = blocks_.upper_bound(static_cast<char const*>(address));
  if (after == blocks_.begin()) return nullptr;
  block* const b = std::prev(after)->second.get();
  return static_cast<char const*>(address) < b->memory + b->size ? b : nullptr;
}

int device_allocator::in_use() {
  std::lock_guard const hold(mutex_);
  int count = 0;
  for (auto const& [address, b] : blocks_) count += b->given_out ? 1 : 0;
  return count;
}

void device_allocator::reset() {
  std::lock_guard const hold(mutex_);
  for (auto const& [address, b] : blocks_) std::free(b->memory), std::free(b->late);
  blocks_.clear();
  freed_.clear();
  uses_.clear();
}

}  // namespace accelerator
