// The order of pytorch#172668 without waits for sends: each rank enqueues a send to the other before its receive. Over a channel
// for each directed edge the order runs, over the communicator of two ranks it does not compile.
// expect: invalid_schedule<chevron::law::deadlock, 0, 3, .*"line 1, column 18: rank 0, step 3: 0SEND_F1 waits for 1RECV_F1, which is queued on rank 1 behind 1SEND_F0; 1SEND_F0 waits for 2RECV_F0, which is queued behind 0SEND_F1; channels: pair. On the channel of ranks 0 and 1 rank 1 enqueues 1SEND_F0 before 1RECV_F1
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/csv.hpp>
#include <chevron/schedule.hpp>

using namespace chevron;

#ifdef LEGAL
constexpr channel_model over = channel_model::edge;
#else
constexpr channel_model over = channel_model::pair;
#endif
inline constexpr auto mine =
    from_csv(
        "0F0,0SEND_F0,0F1,0SEND_F1,2RECV_F0,2F0,2SEND_F0,2RECV_F1,2F1,2SEND_F1,2RECV_B0,2B0,2SEND_B0,2RECV_B1,2B1,2SEND_B1,"
        "0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1,3RECV_F0,3F0,3B0,3SEND_B0,3RECV_F1,3F1,3B1,3SEND_B1,1RECV_B0,1B0,1SEND_B0,"
        "1RECV_B1,1B1,1SEND_B1\n")
        .over(over);
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 2, .micro_batches = 2}>;
