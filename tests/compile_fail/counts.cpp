// Counts that are none, stand in front, come twice, are tokens, or are chosen by C++'s ?:.
// expect: static assertion failed.*a count is an int, or a rank expression made of rank, ranks, micro_batches, chunks and ints: F \* 2
// expect: static assertion failed.*the count stands behind: F \* rank, not rank \* F
// expect: static assertion failed.*this has a count already: multiply the counts instead, as in \(F \+ B\) \* \(2 \* rank\)
// expect: static assertion failed.*only a count follows \*, as in F \* 2; put tokens one after another with \+, as in F \+ B
// expect: static assertion failed.*\+ puts tokens one after another, as in F \+ B; counts are written with \*
// expect: static assertion failed.*a chunk is an int, the same on every rank: F\(1\); a count is written with \*, as in F \* rank
// expect: static assertion failed.*rank expressions are made of rank, ranks, micro_batches, chunks and ints; this is none
// expect: static assertion failed.*a count stands in brackets: F \* \(ranks - rank\), not F \* ranks - rank
// expect: static assertion failed.*max_of takes ints and rank expressions: max_of\(0, rank - 1\)
// expect: static assertion failed.*a rank expression is no condition for \?:, && or \|\|: compute with comparisons, which are 1 or 0, in brackets
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
constexpr auto whole = warmup(F * 2);
constexpr auto worked_out = warmup(F * (ranks - rank));
constexpr auto behind = warmup(F * rank);
constexpr auto once = warmup((F + I) * (rank * 2));
constexpr auto joined = warmup(F + B);
constexpr auto times = warmup(F * 1);
constexpr auto chunk = warmup(F(1));
constexpr auto rounded = warmup(F * (rank + 1));
constexpr auto largest = warmup(F * max_of(rank, 1));
constexpr auto bracketed = warmup(F * (ranks - rank));
constexpr auto chosen = warmup(F * (1 + (rank % 2 == 0)));
#else
constexpr auto whole = warmup(F * 2.5);
constexpr auto worked_out = warmup(F * [](rank_parameters s) { return s.ranks - s.rank; });
constexpr auto behind = warmup(rank * F);
constexpr auto once = warmup((F + I) * rank * 2);
constexpr auto joined = warmup(F * B);
constexpr auto times = warmup(F + 1);
constexpr auto chunk = warmup(F(rank));
constexpr auto rounded = warmup(F * (rank + 0.5));
constexpr auto largest = warmup(F * max_of(rank, 1.5));
constexpr auto bracketed = warmup(F * ranks - rank);
constexpr auto chosen = warmup(F * (rank % 2 == 0 ? 2 : 1));
#endif
