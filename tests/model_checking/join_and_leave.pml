/* How ranks meet and part: transports/rendezvous.hpp (join, leave), transports/gloo/gloo_transport.hpp (close) and
   jobs/failure_monitor.hpp (finish).

   N ranks make two transports, one after the other: each says in the store that it is here, under a name that holds the number of
   its transport, and waits for one other rank, whose layout it compares. Rank 0 then waits for all and publishes their layouts;
   the others wait for these, and each compares all. Then each closes the last: a barrier of all, then it says that it has left, and waits
   until all have; only then connections are closed. At the end it says that it has ended, and rank 0, which hosts the store,
   waits until all have. Any rank may be killed, at most KILLS of them. With OTHER_SHAPE rank 0 has another layout than the rest.

   Deadlines pass only where a rank is dead or has failed: otherwise all come in time. The failure is what the board makes of it:
   the first one counts (failure_reports.pml). */

#ifndef N
#define N 3
#endif
#ifndef KILLS
#define KILLS 0
#endif
#ifdef OTHER_SHAPE
#define shape_of(r) ((r) == 0 -> 2 : 1)
#else
#define shape_of(r) 1
#endif

byte here[2 * N];     /* by transport and rank: the shape it told */
bool told[2];         /* by transport: rank 0 has published all shapes */
byte came[N];         /* how many transports it has begun */
byte arrived, have_left, closed, ended;
bool alive[N] = true;
bool done[N];
bool store_up = true;
bool failure;
byte kills;
hidden byte k;

#ifdef MUTANT_2 /* names without the transport's number */
#define name_of(t, r) (r)
#else
#define name_of(t, r) ((t) * N + (r))
#endif
#define somebody_gone (kills > 0 || failure)

inline fail() { failure = true; goto end_of_rank }

proctype rank(byte me) provided (alive[me]) {
  byte transport = 0, peer = 0;
  do
  :: transport < 2 ->
    assert(store_up || somebody_gone);
    came[me]++;
    here[name_of(transport, me)] = shape_of(me);
    /* One other rank. */
    peer = (me == 0 -> 1 : 0);
    if
    :: here[name_of(transport, peer)] != 0 ->
      if
#ifndef MUTANT_4 /* shapes are not compared */
      :: here[name_of(transport, peer)] != shape_of(me) -> fail()
#endif
      :: else -> skip
      fi
    :: somebody_gone -> fail() /* a failure was told, or the deadline passed */
    fi;
    /* All. */
    peer = 0;
    do
    :: me == 0 && peer < N ->
      if
#ifdef MUTANT_5 /* rank 0 publishes what it has after its own and one more */
      :: peer > 1 -> peer++
#endif
      :: here[name_of(transport, peer)] != 0 -> peer++
      :: somebody_gone -> fail()
      fi
    :: else -> break
    od;
    if
    :: me == 0 -> told[transport] = true
    :: me != 0 ->
#ifndef MUTANT_6 /* nobody waits for rank 0's word */
      if
      :: told[transport] -> skip
      :: somebody_gone -> fail()
      fi
#else
      skip
#endif
    fi;
    peer = 0;
    do
    :: peer < N ->
      if
#ifndef MUTANT_4
      :: here[name_of(transport, peer)] != shape_of(me) -> fail()
#endif
      :: else -> peer++
      fi
    :: else -> break
    od;
    peer = 0; /* SPIN lets nobody jump into a d_step */
    /* Joined: all ranks have come to this transport, and all are of one shape. */
    d_step {
      k = 0;
      do
      :: k < N -> assert(came[k] > transport); assert(shape_of(k) == shape_of(me)); k++
      :: else -> break
      od
    }
    transport++
  :: else -> break
  od;

  /* close(): the barrier. A rank in it needs the others' connections. */
  arrived++;
  if
  :: arrived == N -> assert(somebody_gone || closed == 0) /* no connection is closed under a rank in the barrier */
  :: somebody_gone -> fail()
  fi;
#ifndef MUTANT_1 /* it closes as soon as it is through the barrier */
  have_left++;
  have_left == N || somebody_gone;
#endif
  closed++;

  /* finish() */
  assert(store_up || somebody_gone);
  ended++;
#ifndef MUTANT_3 /* the host of the store does not wait */
  me != 0 || ended == N || somebody_gone;
#endif
end_of_rank:
  skip;
  d_step { store_up = store_up && me != 0; done[me] = true; peer = 0; transport = 0 }
}

proctype killer() {
  byte r;
  do
  :: kills < KILLS ->
    atomic {
      select(r : 0 .. N - 1);
      alive[r] && !done[r] -> alive[r] = false; kills++;
      store_up = store_up && r != 0;
      r = 0
    }
  :: break
  od
}

proctype judge() {
  timeout ->
  d_step {
    k = 0;
    do
    :: k < N ->
      assert(done[k] || !alive[k]); /* everybody ends */
      k++
    :: else -> break
    od;
#ifndef OTHER_SHAPE
    assert(!failure || kills > 0) /* and nobody finds a failure where there is none */
#else
    assert(failure || kills > 0)
#endif
  }
}

init {
  byte r = 0;
  atomic {
    do
    :: r < N -> run rank(r); r++
    :: else -> break
    od;
    run killer();
    run judge()
  }
}
