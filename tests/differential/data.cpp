#include "data.hpp"

#include <ATen/ATen.h>

#include <cmath>
#include <cstdlib>

#include "model.hpp"

namespace differential {

namespace {

at::Tensor normal(dice& d, std::vector<std::int64_t> const& sizes) {
  at::Tensor out = at::empty(sizes, at::kDouble);
  double* const to = out.mutable_data_ptr<double>();
  for (std::int64_t i = 0; i < out.numel(); ++i) {
    double const u = d.real() + 1e-12, v = d.real();
    to[i] = std::sqrt(-2 * std::log(u)) * std::cos(6.283185307179586 * v);
  }
  return out;
}

/// `in=seq:3:6`
at::Tensor make_input(program const& p, dice& d, std::int64_t count, int longer) {
  auto const words = split(p.get("in", "vec:4"), ':');
  auto const number = [&](std::size_t i) { return i < words.size() ? std::atol(words[i].c_str()) : 4L; };
  if (words[0] == "tok") {
    at::Tensor out = at::empty({count, number(1) + longer}, at::kLong);
    for (std::int64_t i = 0; i < out.numel(); ++i) out.mutable_data_ptr<std::int64_t>()[i] = d.below(static_cast<int>(number(2)));
    return out;
  }
  std::vector<std::int64_t> sizes{count};
  if (words[0] == "vec") {
    sizes.push_back(number(1));
  } else if (words[0] == "seq") {
    sizes.insert(sizes.end(), {number(1) + longer, number(2)});
  } else if (words[0] == "img") {
    sizes.insert(sizes.end(), {number(1), number(2), number(2)});
  } else {
    throw meaningless("in=" + words[0]);
  }
  at::Tensor out = normal(d, sizes).to(dtype_of(p));
  return p.has("cl") && out.dim() == 4 ? out.contiguous(at::MemoryFormat::ChannelsLast) : out;
}

samples make_samples(program const& p, dice& d, std::int64_t count, int longer) {
  at::Tensor const input = make_input(p, d, count, longer);
  at::Tensor const target = normal(d, {count, 640}).to(dtype_of(p));
  return {input, p.slices() == 1 && !p.by_sequences() ? target : target.view({count, input.size(1), -1})};
}

/// Slices of each microbatch: lengths differ by at most one, the longer ones come first.
void cut_into_slices(program const& p, feed& of) {
  if (p.slices() == 1) {
    of.units = of.parts;
    return;
  }
  for (samples const& part : of.parts) {
    std::int64_t const tokens = part.input.size(1), slices = p.slices();
    if (tokens < slices) throw meaningless("fewer tokens than slices");
    std::int64_t from = 0;
    for (std::int64_t s = 0; s < slices; ++s) {
      std::int64_t const count = tokens / slices + (s < tokens % slices ? 1 : 0);
      of.units.push_back({part.input.narrow(1, from, count), part.target.narrow(1, from, count),
                          static_cast<double>(count) / static_cast<double>(tokens)});
      from += count;
    }
  }
}

}  // namespace

feed feed_of(program const& p, int step, int pass, int replica) {
  dice d(p.seed() * 1000003 + static_cast<std::uint64_t>((step * 16 + pass + 1) * 8 + replica));
  int const parts = p.micro_batches();
  feed out;
  if (p.get("cut") == "own" && pass >= 0) {
    out.own_parts = true;
    for (int m = 0; m < parts; ++m) {
      int const longer = p.has("long") ? d.below(3) : 0;
      out.parts.push_back(make_samples(p, d, d.between(1, 3) + (p.number("n", parts) >= 2 * parts ? 1 : 0), longer));
    }
    cut_into_slices(p, out);
    return out;
  }
  long n = p.number("n", parts);
  if (p.has("vary")) n += (step * 5 + pass + replica * 3) % 4;
  if (pass < 0) n += 1;
  out.whole = make_samples(p, d, n, 0);
  // Sizes differ by at most one, the larger ones come first.
  std::int64_t from = 0;
  for (int m = 0; m < parts; ++m) {
    std::int64_t const count = n / parts + (m < n % parts ? 1 : 0);
    out.parts.push_back({out.whole.input.narrow(0, from, count), out.whole.target.narrow(0, from, count)});
    from += count;
  }
  cut_into_slices(p, out);
  return out;
}

at::Tensor rows_of(at::Tensor const& target) { return target.dim() > 2 ? target.reshape({target.size(0), -1}) : target; }

double counts_of(program const& p, samples const& part) {
  if (!p.has("weigh")) return p.has("odd") ? 1 : static_cast<double>(part.count()) * part.share;
  return rows_of(part.target).select(1, 0).gt(0).sum().item<double>();
}

double total_of(program const& p, int step, bool evaluation) {
  double all = 0;
  for (int replica = 0; replica < p.replicas(); ++replica) {
    for (int pass = evaluation ? -1 : 0; pass < (evaluation ? 0 : p.passes()); ++pass) {
      feed const given = feed_of(p, step, pass, replica);
      // Counts whole samples: sums of slices' counts would be rounded.
      for (samples const& part : p.has("weigh") ? given.units : given.parts) all += counts_of(p, part);
    }
  }
  return all;
}

double counts_of_own(samples const& part) { return rows_of(part.target).select(1, 2).gt(0).sum().item<double>(); }

double total_of_own(program const& p, int step) {
  double all = 0;
  for (int replica = 0; replica < p.replicas(); ++replica) {
    for (int pass = 0; pass < p.passes(); ++pass) {
      for (samples const& part : feed_of(p, step, pass, replica).units) all += counts_of_own(part);
    }
  }
  return all;
}

}  // namespace differential
