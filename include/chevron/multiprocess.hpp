#pragma once

/// \file
/// <chevron/run.hpp>, and ranks as processes: `launch`, started by a launcher or by itself, and `gloo_transport` between them.

#include <chevron/run.hpp>
#include <chevron/run/comm/gloo/gloo_transport.hpp>
#include <chevron/run/comm/gloo/run_processes.hpp>
#include <chevron/run/launch/launch.hpp>
