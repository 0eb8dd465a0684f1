#pragma once

/// \file
/// Includes <chevron/run.hpp> and adds ranks as processes: `launch` forks the processes or connects to a launcher, and
/// `gloo_transport` sends messages between them.

#include <chevron/run.hpp>
#include <chevron/run/comm/gloo/gloo_transport.hpp>
#include <chevron/run/comm/gloo/run_processes.hpp>
#include <chevron/run/launch/launch.hpp>
