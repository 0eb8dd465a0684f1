// chevron-train: a byte-level GPT on any text, on one or several ranks, under a schedule that was proved first.

#include <chevron/jobs/run_main.hpp>

#include "start.hpp"

int main(int argc, char** argv) {
  return chevron::run_main(argc, argv, [](int count, char** words) { return chevron::train::start(count, words, nullptr); });
}
