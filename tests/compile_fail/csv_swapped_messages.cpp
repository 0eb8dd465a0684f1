// PyTorch 2.15's ZBVZeroBubble on 2 ranks with `defer_pp_recv=True`: rank 1 posts its receives where it uses them, which is not
// the order in which rank 0 sends. PyTorch runs it and trains with wrong gradients; here it does not compile.
// expect: invalid_schedule<chevron::law::matched, 1, 8, .*"line 2, column 53: rank 1, step 8: 2RECV_B0 is posted where this edge delivers 1RECV_F2
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/csv.hpp>
#include <chevron/schedule.hpp>

using namespace chevron;

inline constexpr auto mine = from_csv(
    "0F0,0SEND_F0,0F1,0SEND_F1,0F2,3RECV_F0,0SEND_F2,3F0,3I0,3RECV_F1,3SEND_B0,3W0,3F1,3I1,3SEND_B1,3W1,0RECV_B0,0I0,0W0,"
    "3RECV_F2,3F2,3I2,3SEND_B2,3W2,0RECV_B1,0I1,0W1,0RECV_B2,0I2,0W2\n"
#ifdef LEGAL
    "1RECV_F0,1F0,2F0,2SEND_F0,1RECV_F1,1F1,2F1,2SEND_F1,1RECV_F2,2RECV_B0,2I0,2W0,1F2,1I0,1SEND_B0,1W0,2F2,2SEND_F2,"
#else
    "1RECV_F0,1F0,2F0,2SEND_F0,1RECV_F1,1F1,2F1,2SEND_F1,2RECV_B0,2I0,2W0,1RECV_F2,1F2,1I0,1SEND_B0,1W0,2F2,2SEND_F2,"
#endif
    "2RECV_B1,2I1,2W1,1I1,1SEND_B1,2RECV_B2,2I2,1I2,1SEND_B2,1W1,2W2,1W2\n");
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 2, .micro_batches = 3}>;
