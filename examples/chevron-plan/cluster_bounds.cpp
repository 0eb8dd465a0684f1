// computes: bounds of thousands of ways
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>

#include <chevron/plan/slices.hpp>

#include "cluster.hpp"
#include "cluster_rates.hpp"

namespace plan_program {
namespace {

using chevron::search::piece_bytes;
using chevron::search::piece_costs;

/// Bounds stay below the times that they bound although sums are rounded.
constexpr double rounding = 1 - 1e-9;

/// The least number from which on `holds`, which is false below a number and true from there, within a part in 10^10; from below.
template <class Holds>
double least_that(Holds const& holds) {
  double high = 1;
  while (!holds(high)) high *= 2;
  double low = 0;
  for (int i = 0; i < 80 && high - low > 1e-10 * high; ++i) {
    double const middle = (low + high) / 2;
    (holds(middle) ? high : low) = middle;
  }
  return low;
}

double work_of(piece_costs const& of) { return of.forward + of.backward_input + of.backward_weight; }

/// The parts of a step that bounds count, with recomputation.
struct step_parts {
  chevron::search::layer_costs work;   ///< of a microbatch
  chevron::search::layer_costs first;  ///< of its first slice, with which forwards begin and backwards end
  std::vector<double> sums, after;     ///< by piece: of gradients over replicas; of the optimizer and gathers
  std::vector<double> messages;        ///< by rank: times and latencies of a first slice from stage 0 to the rank's first stage

  step_parts(way const& of, described_model const& model, cluster const& on, sharded_costs const& given)
      : work(given.work), first(given.costs.slices.front()) {
    if (of.recompute) {
      work.recompute();
      first.recompute();
    }
    parameter_times const each = parameter_times_of(of, model, on);
    for (std::size_t i = 0; i < given.parameters.size(); ++i) {
      sums.push_back(each.sum_of(given, i));
      // Where steps overlap, a rank's next step waits for the gather of its first stage alone.
      double const gather = of.post_validated && of.schedule.chunks > 1 ? 0 : each.gather;
      after.push_back(static_cast<double>(given.parameters[i]) * (each.step + gather));
    }
    double const message = given.slices.front().message;
    messages.push_back(0);
    for (int r = 1; r < of.ranks; ++r)
      messages.push_back(messages.back() + message_time(of, on, message, r - 1, r) + message_latency(of, on, r - 1, r));
  }
};

/// One stage on each rank: whether ranks 0, 1 … can take all pieces in order, each as many as it finishes in this time. A rank
/// waits for its first F until one slice has passed all pieces before; behind the last B of a whole backward, the slice goes back
/// through them. Where steps overlap, ranks do not begin and end together, and a rank's own work alone counts.
class pieces_in_order {
 public:
  pieces_in_order(way const& of, step_parts const& parts)
      : of_(of), parts_(parts), whole_backward_(of.schedule.whole_backward && !of.post_validated) {
    least_behind_ = std::numeric_limits<double>::max();
    auto const add = [&](piece_costs const& one, piece_costs const& first) {
      std::size_t const piece = forward_.size() - 1;
      double const behind = parts.sums[piece] + parts.after[piece];
      forward_.push_back(forward_.back() + one.forward);
      back_.push_back(back_.back() + one.backward_input + one.backward_weight);
      first_forward_.push_back(first_forward_.back() + first.forward);
      first_back_.push_back(first_back_.back() + first.backward_input + first.backward_weight);
      behind_.push_back(behind_.back() + behind);
      least_behind_ = std::min(least_behind_, behind);
    };
    add(parts.work.embedding, parts.first.embedding);
    for (std::size_t i = 0; i < parts.work.layers.size(); ++i) add(parts.work.layers[i], parts.first.layers[i]);
    add(parts.work.head, parts.first.head);
  }

  bool operator()(double time) const {
    std::size_t next = 0;
    for (std::size_t r = 0; r < parts_.messages.size(); ++r) {
      double const first = of_.post_validated ? 0 : first_forward_[next] + parts_.messages[r];
      double const way_back = first_back_[next] + parts_.messages[r] + least_behind_;
      std::size_t end = next;
      while (end + 1 < forward_.size()) {
        double const work = of_.micro_batches * (forward_[end + 1] - forward_[next] + back_[end + 1] - back_[next]);
        if (first + work + behind_[end + 1] - behind_[next] > time) break;
        if (whole_backward_ && first + work + way_back > time) break;
        ++end;
      }
      if (end == 0) return false;
      next = end;
    }
    return next + 1 == forward_.size();
  }

 private:
  way const& of_;
  step_parts const& parts_;
  bool whole_backward_;  ///< whether a slice goes back through all pieces behind the rank's last action, before the step ends
  // Sums over the pieces before each: of a microbatch, of its first slice, of the times behind the pipeline.
  std::vector<double> forward_{0}, back_{0}, first_forward_{0}, first_back_{0}, behind_{0};
  double least_behind_ = 0;
};

/// Several stages on each rank: whether the ranks together can take all layers, each as many of the shortest as it finishes in
/// this time. Of the stages before a rank's first one, all but stage 0 have at least one layer. Where steps overlap, a rank's own
/// work alone counts.
class layers_in_any_order {
 public:
  layers_in_any_order(way const& of, step_parts const& parts)
      : parts_(parts), whole_backward_(of.schedule.whole_backward && !of.post_validated) {
    auto const least = [](chevron::search::layer_costs const& of_parts, auto const& number) {
      double out = std::numeric_limits<double>::max();
      for (piece_costs const& one : of_parts.layers) out = std::min(out, number(one));
      return out;
    };
    auto const back_of = [](piece_costs const& one) { return one.backward_input + one.backward_weight; };
    double const layer_forward = least(parts.first, [](piece_costs const& one) { return one.forward; });
    double const layer_back = least(parts.first, back_of);
    layer_ = of.micro_batches * least(parts.work, work_of);
    layer_behind_ = *std::min_element(parts.after.begin() + 1, parts.after.end() - 1);
    last_sum_ = *std::min_element(parts.sums.begin(), parts.sums.end());
    least_behind_ = last_sum_ + *std::min_element(parts.after.begin(), parts.after.end());
    std::size_t const ranks = parts.messages.size(), last = of.schedule.vee ? 0 : ranks - 1;
    ends_.resize(ranks);
    ends_[0].work += of.micro_batches * work_of(parts.work.embedding);
    ends_[0].behind += parts.after.front();
    ends_[last].work += of.micro_batches * work_of(parts.work.head);
    ends_[last].behind += parts.after.back();
    for (std::size_t r = 1; r < ranks && !of.post_validated; ++r) {
      auto const before = static_cast<double>(r - 1);
      ends_[r].first = parts.first.embedding.forward + before * layer_forward + parts.messages[r];
      ends_[r].way_back = back_of(parts.first.embedding) + before * layer_back + parts.messages[r];
    }
    for (piece_costs const& one : parts.work.layers) work_ += of.micro_batches * work_of(one);
    for (std::size_t i = 1; i + 1 < parts.after.size(); ++i) behind_ += parts.after[i];
    for (rank_parts const& one : ends_) {
      work_ += one.first + one.work;
      behind_ += one.behind + last_sum_;
      way_back_ += one.way_back + least_behind_;
    }
  }

  bool operator()(double time) const {
    double layers = 0;
    for (rank_parts const& one : ends_) {
      double const left = time - one.first - one.work, own = left - one.behind - last_sum_,
                   back = left - one.way_back - least_behind_;
      if (own < 0 || (whole_backward_ && back < 0)) return false;
      double most = own / (layer_ + layer_behind_);
      if (whole_backward_) most = std::min(most, back / layer_);
      layers += std::floor(most + 1e-9);
    }
    // The mean rank, too, has that much time.
    double const all = time * static_cast<double>(ends_.size()) * (1 + 1e-12);
    return layers >= static_cast<double>(parts_.work.layers.size()) && work_ + behind_ <= all &&
           (!whole_backward_ || work_ + way_back_ <= all);
  }

 private:
  /// Of one rank: the wait for its first F, work of embedding and head and the times behind it, the way back from its first
  /// stage.
  struct rank_parts {
    double first = 0, work = 0, behind = 0, way_back = 0;
  };

  step_parts const& parts_;
  bool whole_backward_;
  double layer_ = 0, layer_behind_ = 0, last_sum_ = 0, least_behind_ = 0;
  double work_ = 0, behind_ = 0, way_back_ = 0;  ///< sums over the ranks
  std::vector<rank_parts> ends_;
};

/// The bytes that one more layer, at least, takes of a rank, and the bytes of embedding and head.
class rank_bytes {
 public:
  rank_bytes(way const& of, sharded_costs const& given) : of_(of), given_(given) {
    for (slice_sizes const& slice : given.slices) {
      piece_bytes& least = layer_.emplace_back(with_copies(slice.bytes.layers.front(), 1));
      for (std::size_t i = 0; i < slice.bytes.layers.size(); ++i) {
        piece_bytes const one = with_copies(slice.bytes.layers[i], i + 1);
        least.activation = std::min(least.activation, one.activation);
        least.kept = std::min(least.kept, one.kept);
        least.carried = std::min(least.carried, one.carried);
        least.input = std::min({least.input, one.input, one.activation - one.carried});
        if (fixed(one) < fixed(least)) least.fixed = one.fixed, least.state = one.state;
      }
    }
  }

  /// Whether the ranks can take all layers. \param made null: activations do not count
  bool fit(double memory, made_plan const* made) const {
    chevron::search::layer_bytes const& whole = given_.slices.front().bytes;
    double layers = 0;
    for (int r = 0; r < of_.ranks; ++r) {
      double left = memory, most = 0;
      if (r == 0) left -= fixed(with_copies(whole.embedding, 0));
      if (r == (of_.schedule.vee ? 0 : of_.ranks - 1)) left -= fixed(with_copies(whole.head, given_.parameters.size() - 1));
      if (left < 0) return false;
      most = left / std::max(fixed(layer_.front()), 1.0);
      for (std::size_t which = 0; made != nullptr && which < made->held.count(r); ++which) {
        most = std::min(most, layers_beside(made->held.set(r, which), made->held.stages(r), made->plan.stages, left));
        if (most < 0) return false;
      }
      layers += std::floor(most + 1e-9);
    }
    return layers >= static_cast<double>(whole.layers.size());
  }

 private:
  /// The bytes of a piece, with post-validation's copies in its optimizer's state.
  piece_bytes with_copies(piece_bytes of, std::size_t piece) const {
    std::int64_t const copies = of_.post_validated ? given_.parameters[piece] * given_.copied : 0;
    of.fixed += copies;
    of.state += copies;
    return of;
  }
  double fixed(piece_bytes const& of) const {
    int const sharing = of_.sharded ? of_.replicas : 1;
    return static_cast<double>(of.fixed) - static_cast<double>(of.state) * (sharing - 1) / sharing;
  }
  /// The most layers beside which a set of held chunks has room in so many bytes: all of them on the stage whose chunks take
  /// least.
  double layers_beside(std::span<int const> held, std::vector<int> const& stages, int count, double left) const {
    using chevron::search::held_sets;
    double each = std::numeric_limits<double>::max();
    int const* of = held.data();
    for (int const stage : stages) {
      bool const first = stage == 0, last = stage + 1 == count;
      double of_layer = 0;
      for (std::size_t slice = 0; slice < layer_.size(); ++slice, of += held_sets::parts) {
        auto const bytes_of = [&](piece_bytes const& one) {
          auto const part = [&](int which, std::int64_t bytes) {
            return static_cast<double>(of[which]) * static_cast<double>(bytes);
          };
          // A recomputed stage keeps the input of its first piece alone, however many layers it has, and what later slices take.
          return part(held_sets::after_forward, of_.recompute ? one.carried : one.activation) +
                 part(held_sets::whole, one.activation) + part(held_sets::kept, one.kept);
        };
        of_layer += bytes_of(layer_[slice]);
        if (first) left -= bytes_of(given_.slices[slice].bytes.embedding);
        if (last) left -= bytes_of(given_.slices[slice].bytes.head);
        if (!first && !last && of_.recompute)
          left -= static_cast<double>(of[held_sets::after_forward]) * static_cast<double>(layer_[slice].input);
      }
      each = std::min(each, of_layer);
    }
    return left / std::max(fixed(layer_.front()) + each, 1.0);
  }

  way const& of_;
  sharded_costs const& given_;
  std::vector<piece_bytes> layer_;  ///< by slice: the least of all layers
};

}  // namespace

double time_bound(way const& of, described_model const& model, cluster const& on, sharded_costs const& given) {
  step_parts const parts(of, model, on, given);
  return rounding *
         (of.schedule.chunks == 1 ? least_that(pieces_in_order(of, parts)) : least_that(layers_in_any_order(of, parts)));
}

bool too_full(way const& of, std::int64_t memory, sharded_costs const& given, made_plan const* made) {
  return !rank_bytes(of, given).fit(static_cast<double>(memory) / rounding, made);
}

std::int64_t byte_bound(way const& of, sharded_costs const& given, made_plan const& made) {
  rank_bytes const bytes(of, given);
  return static_cast<std::int64_t>(rounding * least_that([&](double memory) { return bytes.fit(memory, &made); }));
}

double bound_of(described_model const& model, cluster const& on, std::vector<int> const& sizes, std::vector<int> const& slices) {
  double least = 0, parameters = 0;
  for (int const samples : sizes) {
    for (int const count : slices) {
      described_model one = model;
      one.setup.samples = samples;
      // W of a rank adds up the gradients of its own experts alone.
      one.setup.expert_ranks = std::gcd(model.size.experts, static_cast<std::int64_t>(on.devices()));
      double work = 0;
      // Slices of equal length have the fewest pairs of queries and keys.
      std::vector<std::int64_t> ends = chevron::cuts_of_equal_time(model.setup.tokens, count, 0);
      ends.push_back(count > 1 ? model.setup.tokens : 0);
      for (std::int64_t const end : ends) {
        one.setup.slice_end = end;
        chevron::profile const made = profile_of_model(one);
        for (std::size_t i = 0; i < made.forward.size(); ++i)
          work += made.forward[i] + made.backward_input[i] + made.backward_weight[i];
        one.setup.slice_begin = end;
      }
      work *= static_cast<double>(on.sequences) / samples;
      if (least == 0 || work < least) least = work;
    }
  }
  for (piece_figures const& piece : decoder_pieces(model.size, model.setup)) parameters += static_cast<double>(piece.parameters);
  auto const moved = static_cast<double>(model.setup.gradient_item() + 2 * model.setup.state_item() + 2 * model.setup.item);
  // Where replicas share the optimizer's state, the optimizer's work is divided among all, too.
  return (least + parameters * moved / model.device.memory * 1e3) / on.devices();
}

}  // namespace plan_program
