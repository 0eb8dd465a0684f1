// chevron-finetune: a Hugging Face folder and files of tokens in, a Hugging Face folder out, under a schedule that was proved
// first.

#include <chevron/jobs/run_main.hpp>

#include "finetune.hpp"

int main(int argc, char** argv) {
  return chevron::run_main(argc, argv, [](int count, char** words) { return chevron::finetune::start(count, words, nullptr); });
}
