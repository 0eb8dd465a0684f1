#pragma once

#include <string_view>

/// \file
/// The machine that carries out a program, in Promela: the second half of what `promela` writes, the same for every program.

namespace chevron::show {

/// Tables of the program stand before it, under these names; `none` is no peer and no slot.
///
/// It says once more what instructions mean (lower/program.hpp) and what a transport promises (run/comm/transport.hpp), and knows
/// nothing of proofs. A rank takes a step where its next instruction does not wait. Posting never waits; a computation waits
/// until what it receives is there, a wait for a send until that is complete. Computations are not interleaved with other ranks,
/// which see nothing of them: they come together with the step before.
///
/// Of each directed edge there are two queues, of posted sends and of posted receives. Once both have an entry, and it is the
/// message's turn on the channels of both ranks, a process of the edge carries the first over, at any moment. A rendezvous send
/// is complete with that, a small one as soon as it is its turn on its own rank. Where hosts wait, a rank goes on behind a
/// message, or a batch of messages, once that has ended.
constexpr std::string_view promela_machine = R"(
#define FORWARD        0
#define BACKWARD       1
#define INPUT_GRADIENT 2
#define WEIGHT         3
#define RECOMPUTE      4
#define OWN_X          5
#define OWN_Z          7
#define SEND_F         8
#define RECV_F         9
#define SEND_B         10
#define RECV_B         11
#define WAIT_SEND_F    12
#define WAIT_SEND_B    13
#define REDUCE_GRAD    14
#define OPTIMIZER_STEP 15
#define UNSHARD        16

/* A rank's memory. Cells and tensors are numbered from 1; 0 is nothing. */
typedef memory {
  tensor graph[MOST_ACTIVATIONS];     /* by activation slot: the cell whose graph it keeps */
  bit    half_done[MOST_ACTIVATIONS]; /* I was done, W was not */
  bit    again[MOST_ACTIVATIONS];     /* R was done, B or I was not */
  tensor output[MOST_ACTIVATIONS];
  tensor gradient[MOST_ACTIVATIONS];  /* of the input */
  tensor received[MOST_RECEIVES];     /* by receive slot: what came, or `pending` */
  tensor user[MOST_RECEIVES];         /* the cell whose graph was built on it */
  tensor sending[MOST_SENDS];         /* by send slot */
  bit    complete[MOST_SENDS];
  byte   to[MOST_SENDS];              /* its receiver */
  short  number[MOST_SENDS];          /* its place in the tables of sends */
  short  over;                        /* the rank's messages that have ended */
  short  position;                    /* the next instruction */
  short  computed;                    /* so many of the plan's actions */
  short  held;                        /* chunks in flight */
  int    held_bytes;
  bit    stepped
};
memory at[MOST_RANKS];
byte  forwards_run[MOST_SEQUENCES];   /* by stage and microbatch: slices whose F has run, */
byte  gradients_run[MOST_SEQUENCES];  /* and whose B or I */
short added[MOST_STAGES];             /* gradients in a stage's sum */
bit summed[MOST_STAGES];
bit whole[MOST_STAGES];               /* its parameters are there */
int messages;
byte ended;

short through[2 * MOST_RANKS * MOST_RANKS]; /* by channel of a rank: its messages that have ended */
short carried[MOST_EDGES];              /* messages of an edge whose receives have ended */
bit gone[MOST_MESSAGES];                /* by place in the tables of sends: a small send that has ended */

chan sent[MOST_EDGES] = [MOST_SENDS] of { tensor, slot_number };
chan posted[MOST_EDGES] = [MOST_RECEIVES] of { tensor, slot_number };

/* They hold nothing between two steps, so they are no part of a state. */
hidden int here, cell, from, wanted, content, k;
hidden short slot_there;
hidden byte more, goes_forward;

#define field(i, f)  code[(start[me] + (i)) * 8 + (f)]
#define op(i)        field(i, 0)
#define stage(i)     field(i, 1)
#define batch(i)     field(i, 2)
#define peer(i)      field(i, 3)
#define slot(i)      field(i, 4)
#define source(i)    field(i, 5)
#define local(i)     field(i, 6)
#define fused(i)     field(i, 7)
#define length       (start[me + 1] - start[me])
#define plan_length  (plan_start[me + 1] - plan_start[me])
#define planned(f)   plan[(plan_start[me] + at[me].computed) * 4 + (f)]
#define cell_of(s, m)      (1 + (s) * micro_batches + (m))
#define tensor_of(s, m, g) (1 + 2 * ((s) * micro_batches + (m)) + (g))
#define edge_of(a, b)      edge[(a) * ranks + (b)]
#define is_small(n)        (buffered || small[n])
/* Of the channel of a rank's sends or receives to or from another: one for a direction, for both, or one for all ranks. */
#define ended_of(me, other, sends_it) \
  through[2 * ((me) * ranks + (channels == 2 -> 0 : (other))) + (channels == 0 -> (sends_it) : 0)]
#define next_send(a, b)    (first_send[edge_of(a, b)] + carried[edge_of(a, b)])
#define next_receive(a, b) (first_receive[edge_of(a, b)] + carried[edge_of(a, b)])
#define is_its_turn(a, b)  ((gone[next_send(a, b)] || ended_of(a, b, 1) >= send_turn[next_send(a, b)]) && \
                            ended_of(b, a, 0) >= receive_turn[next_receive(a, b)])

#define lacks_input(i) (op(i) <= INPUT_GRADIENT && source(i) < receives[me] && at[me].received[source(i)] == pending)
#define lacks_end(i)   ((op(i) == WAIT_SEND_F || op(i) == WAIT_SEND_B) && source(i) < sends[me] && \
                        at[me].sending[source(i)] != 0 && !at[me].complete[source(i)])
#define lacks_half(i)  (fused(i) && (i) + 1 < length && lacks_input((i) + 1))
#define lacks_host(i)  (at[me].over < after_messages[start[me] + (i)])
#define waits(i)       (lacks_input(i) || lacks_end(i) || lacks_half(i) || lacks_host(i))
#define is_silent(i)   (op(i) <= OWN_Z || op(i) >= REDUCE_GRAD)

/* Of rank r, from send slots: each small send ends whose turn it is. */
inline end_small_sends(r) {
  k = 0;
  do
  :: k < sends[r] && at[r].sending[k] != 0 && !at[r].complete[k] && is_small(at[r].number[k]) &&
     ended_of(r, at[r].to[k], 1) >= send_turn[at[r].number[k]] ->
    at[r].complete[k] = 1;
    gone[at[r].number[k]] = 1;
    ended_of(r, at[r].to[k], 1) = ended_of(r, at[r].to[k], 1) + 1;
    at[r].over++;
    k = 0 /* the channel's next may be small, too */
  :: k < sends[r] && !(at[r].sending[k] != 0 && !at[r].complete[k] && is_small(at[r].number[k]) &&
                       ended_of(r, at[r].to[k], 1) >= send_turn[at[r].number[k]]) -> k++
  :: else -> break
  od;
  k = 0
}

inline compute(i) {
  assert(slot(i) < activations[me]);
  assert(at[me].computed < plan_length); /* nothing is computed that the plan does not have */
  assert(op(i) == planned(0) && stage(i) == planned(1) && batch(i) == planned(2) && fused(i) == planned(3));
  assert(!fused(i) || (op(i) == FORWARD && i + 1 < length && (op(i + 1) == BACKWARD || op(i + 1) == INPUT_GRADIENT)));
  assert(!fused(i) || stage(i + 1) != stage(i) || batch(i + 1) != batch(i)); /* its own backward needs it */
  at[me].computed++;
  cell = cell_of(stage(i), batch(i));
  goes_forward = (op(i) == FORWARD);
  if
  :: slices == 1 || op(i) >= WEIGHT
  :: else -> /* F takes the carry of the slice before, B and I its gradient, of the slice behind */
    k = (cell - 1) / slices;
    if
    :: goes_forward ->
      assert(forwards_run[k] == batch(i) % slices);
      forwards_run[k] = forwards_run[k] + 1
    :: else ->
      assert(gradients_run[k] == slices - 1 - batch(i) % slices);
      gradients_run[k] = gradients_run[k] + 1
    fi;
    k = 0
  fi;
  if
  :: goes_forward
  :: else ->
    assert(at[me].graph[slot(i)] == cell); /* F came before, and its slot was left alone */
    assert(at[me].half_done[slot(i)] == (op(i) == WEIGHT));
    assert(op(i) != RECOMPUTE || !at[me].again[slot(i)]);
    at[me].again[slot(i)] = (op(i) == RECOMPUTE)
  fi;
  if
  :: op(i) >= WEIGHT || (goes_forward && stage(i) == 0) || (!goes_forward && stage(i) + 1 == stages) ->
    assert(op(i) >= WEIGHT || (local(i) == none && source(i) == none))
  :: else ->
    from = stage(i) + (goes_forward -> -1 : 1);
    wanted = tensor_of(from, batch(i), (goes_forward -> 0 : 1));
    if
    :: home[from] == me ->
      assert(source(i) == none && local(i) < activations[me]);
      if
      :: goes_forward ->
        assert(at[me].output[local(i)] == wanted); /* the neighbour on this rank has computed it */
        at[me].output[local(i)] = 0
      :: else ->
        assert(at[me].gradient[local(i)] == wanted);
        at[me].gradient[local(i)] = 0
      fi
    :: else ->
      assert(local(i) == none && source(i) < receives[me]);
      assert(at[me].received[source(i)] == wanted); /* it was received, and not written over */
      assert(at[me].user[source(i)] == 0);
      if
      :: forward_only -> at[me].received[source(i)] = 0
      :: else -> at[me].user[source(i)] = cell
      fi
    fi
  fi;
  if
  :: goes_forward ->
    assert(at[me].graph[slot(i)] == 0 && at[me].output[slot(i)] == 0 && at[me].gradient[slot(i)] == 0);
    if
    :: stage(i) + 1 < stages -> at[me].output[slot(i)] = tensor_of(stage(i), batch(i), 0)
    :: else
    fi;
    if
    :: forward_only
    :: else ->
      at[me].graph[slot(i)] = cell;
      at[me].held++;
      at[me].held_bytes = at[me].held_bytes + (runs_again[cell - 1] -> input_weight[stage(i)] : weight[stage(i)]);
      assert(in_flight_limit == 0 || at[me].held <= in_flight_limit);
      assert(byte_limit == 0 || at[me].held_bytes <= byte_limit)
    fi
  :: op(i) == RECOMPUTE -> /* from here on the chunk holds more than its inputs */
    at[me].held_bytes = at[me].held_bytes + weight[stage(i)] - input_weight[stage(i)];
    assert(byte_limit == 0 || at[me].held_bytes <= byte_limit)
  :: op(i) == BACKWARD || op(i) == INPUT_GRADIENT ->
    at[me].half_done[slot(i)] = 1;
    if
    :: stage(i) > 0 -> at[me].gradient[slot(i)] = tensor_of(stage(i), batch(i), 1)
    :: else
    fi
  :: else
  fi;
  if
  :: op(i) == BACKWARD || op(i) == WEIGHT -> /* the graph goes, and what it was built on */
    at[me].graph[slot(i)] = 0;
    at[me].half_done[slot(i)] = 0;
    added[stage(i)]++;
    at[me].held--;
    at[me].held_bytes = at[me].held_bytes - weight[stage(i)];
    k = 0;
    do
    :: k < receives[me] && at[me].user[k] == cell -> at[me].user[k] = 0; at[me].received[k] = 0; k++
    :: k < receives[me] && at[me].user[k] != cell -> k++
    :: else -> break
    od
  :: else
  fi
}

inline perform(i) {
  assert(op(i) <= UNSHARD && (op(i) <= OWN_Z || !fused(i)));
  assert(op(i) == OPTIMIZER_STEP || (stage(i) < stages && home[stage(i)] == me));
  assert(op(i) >= REDUCE_GRAD || batch(i) < micro_batches);
  assert(op(i) > OWN_Z || forward_only || whole[stage(i)]); /* no computation reads parameters before they are whole */
  if
  :: op(i) >= SEND_F && op(i) <= WAIT_SEND_B -> assert(peer(i) < ranks && peer(i) != me)
  :: else
  fi;
  if
  :: op(i) <= RECOMPUTE -> compute(i)
  :: op(i) >= OWN_X && op(i) <= OWN_Z -> /* nobody waits for it, and it takes nothing */
    assert(at[me].computed < plan_length);
    assert(op(i) == planned(0) && stage(i) == planned(1) && batch(i) == planned(2) && !fused(i));
    at[me].computed++
  :: op(i) == SEND_F || op(i) == SEND_B ->
    wanted = tensor_of(stage(i), batch(i), (op(i) == SEND_F -> 0 : 1));
    assert(slot(i) < activations[me] && source(i) < sends[me]);
    assert(at[me].sending[source(i)] == 0); /* the send slot's last send has been waited for */
    if
    :: op(i) == SEND_F -> assert(at[me].output[slot(i)] == wanted); at[me].output[slot(i)] = 0
    :: else -> assert(at[me].gradient[slot(i)] == wanted); at[me].gradient[slot(i)] = 0
    fi;
    messages++;
    assert(message_limit == 0 || messages <= message_limit);
    at[me].sending[source(i)] = wanted;
    at[me].to[source(i)] = peer(i);
    at[me].number[source(i)] = next_send(me, peer(i)) + len(sent[edge_of(me, peer(i))]);
    sent[edge_of(me, peer(i))] ! wanted, source(i);
    end_small_sends(me)
  :: op(i) == RECV_F || op(i) == RECV_B ->
    assert(source(i) < receives[me]);
    assert(at[me].received[source(i)] == 0 && at[me].user[source(i)] == 0); /* its slot is free */
    assert((op(i) == RECV_F -> stage(i) > 0 : stage(i) + 1 < stages));
    wanted = tensor_of(stage(i) + (op(i) == RECV_F -> -1 : 1), batch(i), (op(i) == RECV_F -> 0 : 1));
    at[me].received[source(i)] = pending;
    posted[edge_of(peer(i), me)] ! wanted, source(i)
  :: op(i) == WAIT_SEND_F || op(i) == WAIT_SEND_B ->
    assert(source(i) < sends[me]);
    assert(at[me].sending[source(i)] == tensor_of(stage(i), batch(i), (op(i) == WAIT_SEND_F -> 0 : 1)));
    assert(at[me].to[source(i)] == peer(i));
    at[me].sending[source(i)] = 0;
    at[me].complete[source(i)] = 0;
    at[me].to[source(i)] = 0;
    at[me].number[source(i)] = 0
  :: op(i) == REDUCE_GRAD ->
    assert(!forward_only && !summed[stage(i)]);
    assert(added[stage(i)] == micro_batches); /* all gradients are in the sum */
    summed[stage(i)] = 1
  :: op(i) == UNSHARD ->
    assert(!forward_only && !whole[stage(i)]);
    whole[stage(i)] = 1
  :: op(i) == OPTIMIZER_STEP ->
    assert(!forward_only && !at[me].stepped);
    k = 0;
    do
    :: k < stages -> assert(home[k] != me || summed[k]); k++
    :: else -> break
    od;
    at[me].stepped = 1
  fi
}

/* Everything was computed, everything was let go. */
inline look_back() {
  assert(at[me].computed == plan_length);
  assert(at[me].stepped == !forward_only);
  k = 0;
  do
  :: k < activations[me] ->
    assert(at[me].graph[k] == 0 && at[me].output[k] == 0 && at[me].gradient[k] == 0); k++
  :: else -> break
  od;
  k = 0;
  do
  :: k < receives[me] -> assert(at[me].received[k] == 0 && at[me].user[k] == 0); k++
  :: else -> break
  od;
  k = 0;
  do
  :: k < sends[me] -> assert(at[me].sending[k] == 0); k++
  :: else -> break
  od;
  ended++;
  k = 0;
  do
  :: ended == ranks && k < edges -> assert(empty(sent[k]) && empty(posted[k])); k++ /* no message is left over */
  :: else -> break
  od
}

proctype rank(byte me) {
  do
  :: d_step {
      at[me].position < length && !waits(at[me].position) ->
      more = 1;
      do
      :: more ->
        here = at[me].position;
        perform(here);
        at[me].position = here + 1;
        more = (here + 1 < length && is_silent(here + 1) && !waits(here + 1))
      :: else -> break
      od
    }
  :: at[me].position == length -> break
  od;
  skip; /* SPIN lets nobody jump into a d_step */
  d_step { look_back() }
}

/* The first send and the first receive of an edge meet. */
proctype carrier(byte a; byte b) {
end:
  do
  :: d_step {
      len(sent[edge_of(a, b)]) * len(posted[edge_of(a, b)]) > 0 && is_its_turn(a, b) ->
      sent[edge_of(a, b)] ? content, slot_there;
      if
      :: gone[next_send(a, b)] /* its slot may be another send's by now */
      :: else ->
        at[a].complete[slot_there] = 1;
        ended_of(a, b, 1) = ended_of(a, b, 1) + 1;
        at[a].over++
      fi;
      posted[edge_of(a, b)] ? wanted, slot_there;
      assert(content == wanted); /* the message that arrives is the one that the receive is for */
      at[b].received[slot_there] = content;
      ended_of(b, a, 0) = ended_of(b, a, 0) + 1;
      at[b].over++;
      carried[edge_of(a, b)] = carried[edge_of(a, b)] + 1;
      end_small_sends(a);
      end_small_sends(b)
    }
  od
}

init {
  prepare;
  atomic {
    k = 0;
    do
    :: k < ranks -> run rank(k); k++
    :: else -> break
    od;
    k = 0;
    do
    :: k < ranks * ranks ->
      if
      :: edge[k] != none -> run carrier(k / ranks, k % ranks)
      :: else
      fi;
      k++
    :: else -> break
    od
  }
}
)";

}  // namespace chevron::show
