#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>

/// \file
/// Calls LibTorch's vector functions in one thread, before a process's other threads may call them.

namespace chevron::detail {

/// Calls each function that LibTorch implements by MKL's vector library (ATen/cpu/vml.h), once per process.
///
/// Must run before ranks start as threads. If several threads make a process's first calls of `sqrt` at once, MKL sometimes
/// computes a call with only 12 bits of precision: after AdamW's first step replicas then differ by 1e-4 of the update (7 of
/// 6,000 runs on two busy cores; 0 of 6,000 after a first call by one thread).
inline void prepare_vector_math() {
  static bool const done = [] {
    at::NoGradGuard const no_graph;
    for (at::ScalarType const type : {at::kFloat, at::kDouble}) {
      at::Tensor const x = at::full({64}, 0.5, type);
      for (at::Tensor const& y :
           {x.acos(),  x.asin(), x.atan(), x.cos(),  x.cosh(), x.erf(),  x.erfc(),  x.erfinv(), x.exp(),   x.expm1(), x.log(),
            x.log10(), x.sin(),  x.sinh(), x.sqrt(), x.tan(),  x.tanh(), x.trunc(), x.abs(),    x.log1p(), x.log2()})
        (void)y;
    }
    return true;
  }();
  (void)done;
}

}  // namespace chevron::detail
