#pragma once

namespace accelerator {

/// Registers the device's operators with LibTorch. Once in a process, after `install`.
void install_operators();

}  // namespace accelerator
