#include "accelerator/device.hpp"

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "accelerator/allocator.hpp"
#include "accelerator/late.hpp"

namespace accelerator {

namespace {

constexpr auto kind = c10::DeviceType::PrivateUse1;

/// Streams of a thread. Numbers of before the last `start_over` are not used any more.
struct thread_state {
  int device = 0;
  long age = -1;
  std::array<int, device_count> streams{};
};
std::atomic<long> age{0};
std::atomic<bool> lost{false};
std::atomic<long> events{0};
thread_local thread_state here;

std::array<int, device_count>& streams_here() {
  if (here.age != age) {
    for (int d = 0; d < device_count; ++d) here.streams[static_cast<std::size_t>(d)] = d;
    here.age = age;
  }
  return here.streams;
}

struct event_state {
  clock known;
  late_point place;
  int device = 0;
  std::chrono::steady_clock::time_point when;
};

struct guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kind; }
  c10::Device exchangeDevice(c10::Device d) const override {
    c10::Device const before = getDevice();
    setDevice(d);
    return before;
  }
  c10::Device getDevice() const override { return device(here.device); }
  void setDevice(c10::Device d) const override {
    TORCH_CHECK(d.index() < device_count, "there is no device ", d);
    if (d.has_index()) here.device = d.index();
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override { here.device = d.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count; }

  c10::Stream getStream(c10::Device d) const override {
    int const index = d.has_index() ? d.index() : here.device;
    return stream_of(index, current_stream(index));
  }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream_of(d.index(), d.index()); }
  c10::Stream getNewStream(c10::Device d, int) const override {
    int const index = d.has_index() ? d.index() : here.device;
    return stream_of(index, detector::instance().add_stream(index, "stream"));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    c10::Stream const before = getStream(s.device());
    streams_here()[static_cast<std::size_t>(s.device_index())] = number_of(s);
    return before;
  }
  bool queryStream(c10::Stream const& s) const override {
    synchronizeStream(s);
    return true;
  }
  void synchronizeStream(c10::Stream const& s) const override { host_waits_for(s.device_index(), number_of(s)); }

  void record(void** event, c10::Stream const& s, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new event_state;
      ++events;
    }
    auto& e = *static_cast<event_state*>(*event);
    e.known = detector::instance().now(number_of(s));
    e.place = late_streams::instance().now(number_of(s));
    e.device = s.device_index();
    e.when = std::chrono::steady_clock::now();
  }
  void block(void* event, c10::Stream const& s) const override {
    TORCH_CHECK(!lost, "the device is lost");
    if (event == nullptr) return;
    auto const& e = *static_cast<event_state*>(event);
    detector::instance().wait(number_of(s), e.known);
    late_streams::instance().wait(number_of(s), e.place);
  }
  bool queryEvent(void* event) const override {
    synchronizeEvent(event);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    auto const& e = *static_cast<event_state*>(event);
    detector::instance().host_waited(e.device, e.known);
    late_streams::instance().run_to(e.place);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<event_state*>(event); }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    auto const span = static_cast<event_state*>(to)->when - static_cast<event_state*>(from)->when;
    return std::chrono::duration<double, std::milli>(span).count();
  }
  void recordDataPtrOnStream(c10::DataPtr const& of, c10::Stream const& s) const override {
    device_allocator::instance().recordStream(of, s);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, guard);

/// Draws the CPU's numbers. As on a GPU an offset counts on with each draw.
struct generator final : c10::GeneratorImpl {
  explicit generator(int index)
      : GeneratorImpl(device(index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inside(at::make_generator<at::CPUGeneratorImpl>()) {}
  void set_current_seed(std::uint64_t seed) override {
    inside.set_current_seed(seed);
    draws = 0;
  }
  void set_offset(std::uint64_t offset) override { draws = offset; }
  std::uint64_t get_offset() const override { return draws; }
  std::uint64_t current_seed() const override { return inside.current_seed(); }
  std::uint64_t seed() override { return inside.seed(); }
  void set_state(c10::TensorImpl const& state) override {
    auto const* const begin = static_cast<char const*>(state.data());
    std::memcpy(&draws, begin, sizeof draws);
    at::Tensor of_inside = inside.get_state();
    std::memcpy(of_inside.mutable_data_ptr(), begin + sizeof draws, of_inside.nbytes());
    inside.set_state(of_inside);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor const of_inside = inside.get_state();
    at::Tensor all = at::empty({static_cast<std::int64_t>(sizeof draws + of_inside.nbytes())}, at::kByte);
    auto* const begin = static_cast<char*>(all.mutable_data_ptr());
    std::memcpy(begin, &draws, sizeof draws);
    std::memcpy(begin + sizeof draws, of_inside.const_data_ptr(), of_inside.nbytes());
    return all.getIntrusivePtr();
  }
  generator* clone_impl() const override { return new generator(device().index()); }
  static c10::DeviceType device_type() { return kind; }

  static at::Device device(int index) { return accelerator::device(index); }
  c10::Device device() const { return GeneratorImpl::device(); }

  at::Generator inside;
  std::uint64_t draws = 0;
};

struct hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count; }
  at::Generator const& getDefaultGenerator(c10::DeviceIndex index) const override {
    return generator_of(index < 0 ? here.device : index);
  }
};

}  // namespace

void install() {
  static bool const done = [] {
    at::RegisterPrivateUse1HooksInterface(new hooks);
    c10::register_privateuse1_backend("accel");
    c10::SetAllocator(kind, &device_allocator::instance());
    detector::instance().reset(device_count);
    return true;
  }();
  static_cast<void>(done);
}

int start_over(bool late) {
  int const left = device_allocator::instance().in_use();
  if (left == 0) {
    late_streams::instance().turn(late);
    device_allocator::instance().reset();
    detector::instance().reset(device_count);
    ++age;
  }
  return left;
}

void lose_device(bool is_lost) { lost = is_lost; }
long events_made() { return events; }

int current_device() { return here.device; }
int current_stream(int device) { return streams_here()[static_cast<std::size_t>(device)]; }

int number_of(c10::Stream stream) { return stream.id() == 0 ? stream.device_index() : static_cast<int>(stream.id()); }
c10::Stream stream_of(int device, int number) {
  return c10::Stream(c10::Stream::UNSAFE, accelerator::device(device), number == device ? 0 : number);
}

at::Tensor alias_on_cpu(at::Tensor const& t) {
  if (!t.defined() || t.is_cpu()) return t;
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().device(at::kCPU).requires_grad(false));
}

at::Tensor late_alias(at::Tensor const& t) {
  if (!t.defined() || t.is_cpu()) return t;
  block const* const b = t.numel() == 0 ? nullptr : device_allocator::instance().find(t.data_ptr());
  char* const place = b == nullptr ? nullptr : b->late + (static_cast<char*>(t.data_ptr()) - b->memory);
  return at::from_blob(place, t.sizes(), t.strides(), t.options().device(at::kCPU).requires_grad(false));
}

touched part_of(at::Tensor const& t, bool writes) {
  block* const b = t.numel() == 0 ? nullptr : device_allocator::instance().find(t.data_ptr());
  if (b == nullptr) return {};
  std::int64_t last = 0;
  for (std::int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  auto const begin = static_cast<std::size_t>(static_cast<char*>(t.data_ptr()) - b->memory);
  return {&b->history, begin, begin + static_cast<std::size_t>(last + 1) * t.element_size(), writes};
}

void host_waits_for(int index, int stream) {
  auto& known = detector::instance();
  known.host_waited(index, known.now(stream));
  late_streams::instance().run_to(late_streams::instance().now(stream));
}

at::Generator const& generator_of(int index) {
  static std::array<at::Generator, device_count> const all = [] {
    std::array<at::Generator, device_count> made;
    for (int d = 0; d < device_count; ++d) made[static_cast<std::size_t>(d)] = at::make_generator<generator>(d);
    return made;
  }();
  return all[static_cast<std::size_t>(index)];
}

at::Generator draw_from(at::Generator const& of_device) {
  auto* const impl = static_cast<generator*>(of_device.unsafeGetGeneratorImpl());
  ++impl->draws;
  return impl->inside;
}

}  // namespace accelerator
