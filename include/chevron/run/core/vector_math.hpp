#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>

/// \file
/// Makes one thread call LibTorch's vector functions first in a process.

namespace chevron::detail {

/// Calls, once in this process, each function that LibTorch hands to MKL's vector library (ATen/cpu/vml.h).
///
/// Ranks that are threads must call it before they start. Where several threads make a process's first `sqrt` at once, MKL now
/// and then computes one of them with 12 bits: after AdamW's first step replicas then differ by 1e-4 of the update (7 of
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
