#pragma once

/// \file
/// Everything that runs programs on LibTorch. Needs LibTorch; <chevron/schedule.hpp> does not.

#include <chevron/run/chunk.hpp>
#include <chevron/run/error.hpp>
#include <chevron/run/evaluator.hpp>
#include <chevron/run/executor.hpp>
#include <chevron/run/gradients.hpp>
#include <chevron/run/learning_rate.hpp>
#include <chevron/run/loss.hpp>
#include <chevron/run/micro_batch.hpp>
#include <chevron/run/optimizer_step.hpp>
#include <chevron/run/partition.hpp>
#include <chevron/run/preflight.hpp>
#include <chevron/run/random.hpp>
#include <chevron/run/record.hpp>
#include <chevron/run/skip.hpp>
#include <chevron/run/split_backward.hpp>
#include <chevron/run/stage.hpp>
#include <chevron/run/threads.hpp>
#include <chevron/run/tied.hpp>
#include <chevron/run/trainer.hpp>
#include <chevron/run/transport.hpp>
