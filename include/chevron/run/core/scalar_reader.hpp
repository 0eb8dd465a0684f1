#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>

#include <chevron/run/core/host_copy.hpp>
#include <chevron/run/core/tensors.hpp>

/// \file
/// Reads scalars that an accelerator or the host computes.

namespace chevron::detail {

/// Copies lists of scalars to the host together, so that the host waits for the accelerator once.
class scalar_reader {
 public:
  /// Receives the values of a list in double, in the order of its scalars.
  using taker = std::function<void(std::span<double const>)>;

  /// Adds a list of scalars to be read. The host does not wait. Scalars in main memory are read at once.
  /// \param scalars tensors without dimensions, on one device; may be empty \param take receives the values in `read`
  void ask(tensors const& scalars, taker take) {
    list& one = lists_.emplace_back();
    one.take = std::move(take);
    if (!scalars.empty() && !scalars[0].is_cpu()) {
      one.away = at::stack(scalars).to(at::kDouble);
      return;
    }
    for (at::Tensor const& scalar : scalars) one.here.push_back(scalar.item<double>());
  }

  /// Begins to copy all requested values. The host does not wait.
  void start() {
    tensors away;
    for (list const& l : lists_) {
      if (l.away.defined()) away.push_back(l.away);
    }
    if (!away.empty()) copy_.emplace(at::cat(away));
  }
  /// Waits for all requested values, and passes each list to its taker, in the order of requests. Begins the copy if `start` was
  /// not called.
  void read() {
    if (!copy_) start();
    at::Tensor const copied = copy_ ? copy_->wait() : at::Tensor();
    copy_.reset();
    std::int64_t next = 0;
    for (list const& l : std::exchange(lists_, {})) {
      if (!l.away.defined()) {
        l.take(l.here);
        continue;
      }
      std::int64_t const count = l.away.numel();
      at::Tensor const values = copied.narrow(0, std::exchange(next, next + count), count);
      l.take({values.const_data_ptr<double>(), static_cast<std::size_t>(count)});
    }
  }

 private:
  struct list {
    at::Tensor away;           // values of scalars on an accelerator; else undefined
    std::vector<double> here;  // values of scalars in main memory
    taker take;
  };
  std::vector<list> lists_;
  std::optional<async_host_copy> copy_;
};

}  // namespace chevron::detail
