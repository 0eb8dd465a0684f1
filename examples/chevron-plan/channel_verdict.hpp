#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <chevron/lower/program.hpp>
#include <chevron/plan/channels.hpp>

#include "request.hpp"

/// \file
/// Judges a schedule's messages over channels that messages share, as NCCL's communicators (`check --channels`).

namespace plan_program {

/// The verdict on a schedule's messages.
struct channel_verdict {
  std::string words;   ///< the models that are proved, and the cycles of the others: lines for the output
  std::string broken;  ///< the broken law, if the model asked for does not hold, or none holds; else empty
};

/// The model that `--channels` names; none without the flag. Throws `usage` for a name that is none.
std::optional<chevron::channel_model> model_asked(request const& asked);

/// Sizes of messages, and below which size sends are buffered; 0: none is.
struct channel_sizes {
  owned_sizes messages;
  std::int64_t buffered_below = 0;
};

/// `--buffered-below` and `--message-bytes`. Throws `usage` for the first without the second.
channel_sizes channel_sizes_of(request const& asked, int stages);

/// Throws `usage` if a flag of channels is given, for formats of `lower` that have none.
void refuse_channels(request const& asked);

/// Plays the messages over the model that `--channels` names, or over all models.
/// \param from the file of `--schedule`; null for a schedule of the catalogue
/// \param program the schedule as Chevron lowers it. Its messages in PyTorch's notation (`lower --format csv-comms`) are judged
///                if `from` has none
channel_verdict verdict_on_channels(request const& asked, foreign const* from, chevron::program_view const& program);

}  // namespace plan_program
