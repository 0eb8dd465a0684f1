/* How ranks hear of a failure: jobs/failure_reports.hpp and failure_monitor.hpp, jobs/rank_processes.hpp and run_main.hpp.

   A rank is a main thread, which waits for others, computes without an end, or throws; and a watch, which polls the store, reports
   what its rank found, sees that a connection broke, and ends a rank that is busy. Any rank may be killed between any two steps,
   at most KILLS of them. The store is the launcher's (HOST == N), who also sees its children end, or rank HOST's.

   Times are left out: what takes some time may happen at any moment. One bound is kept as what it is for: a host of the store that
   fails, or is ended since it is busy, goes before all others have read why only if one of them is dead. (It lingers for 0.8 s,
   and a busy rank is ended after 1.5 s; a poll comes every 0.1 s.) A launcher sends SIGKILL at any moment after the first failure.
   Nothing here goes round: so where nobody can move (`timeout`), all has ended that ever will. */

#ifndef N
#define N 3
#endif
#ifndef HOST
#define HOST N
#endif
#ifndef KILLS
#define KILLS 1
#endif

/* Causes: 0 none, 1 + r: rank r threw, 1 + N + r: rank r was lost. */
#define threw(r) (1 + (r))
#define lost(r)  (1 + N + (r))

byte failure;        /* in the store */
byte acknowledged;
bool store_up = true;
bool alive[N] = true;
bool busy[N];
byte report[N];      /* from the main thread to its watch */
byte verdict[N];     /* what the rank takes for the cause */
bool alone[N];       /* the verdict is the rank's own, as there is no store */
byte kills;
byte first_of_launcher;

#define somebody_killed (kills > 0)

/* The store goes first: nothing runs of a rank that is not alive. What is of no use any more is forgotten, for fewer states. */
inline end_rank(r) {
  if
  :: r == HOST -> store_up = false
  :: else
  fi;
  report[r] = 0;
  busy[r] = false;
  alive[r] = false
}

/* compareSet: the first counts, everybody gets what counts. */
inline publish(mine) {
#ifdef MUTANT_1 /* written whatever is there */
  failure = mine
#else
  if
  :: failure == 0 -> failure = mine
  :: else
  fi
#endif
}

proctype rank(byte me) provided (alive[me]) {
  if
  :: true -> /* it waits for others, until its watch ends the wait */
    verdict[me] != 0
  :: true -> /* it computes, and looks at nothing */
    busy[me] = true;
    false
  :: true -> /* it throws: end_failing reports, then ends */
    if
    :: verdict[me] == 0 ->
      report[me] = threw(me);
#ifndef MUTANT_2 /* ends before its report is published */
      verdict[me] != 0
#endif
    :: else
    fi
  fi;
  if
  :: me == HOST ->
#ifndef MUTANT_3 /* the host of the store does not linger */
    acknowledged >= N - 1 || somebody_killed;
#endif
    d_step { end_rank(me) }
  :: else -> d_step { end_rank(me) }
  fi
}

proctype watch(byte me) provided (alive[me]) {
  byte found = 0; /* by this rank, then what counts */
  do
  :: verdict[me] == 0 && store_up && failure != 0 -> found = failure; goto hear /* poll */
  :: verdict[me] == 0 && report[me] != 0 -> found = report[me]; goto settle
  :: verdict[me] == 0 ->
    /* A connection that broke: some rank's that has ended. */
    atomic {
      if
      :: me != 0 && !alive[0] -> found = lost(0)
      :: me != 1 && !alive[1] -> found = lost(1)
#if N > 2
      :: me != 2 && !alive[2] -> found = lost(2)
#endif
#if N > 3
      :: me != 3 && !alive[3] -> found = lost(3)
#endif
      fi
    }
    goto settle
  :: verdict[me] == 0 && !store_up -> goto store_gone
  od;
settle:
  if
  :: atomic { store_up -> publish(found); found = failure }
  :: !store_up -> goto store_gone
  fi;
hear:
  /* The acknowledgement goes out before the rank hears of it, and so before it can end. */
  if
  :: me == HOST
  :: me != HOST && store_up -> acknowledged++
  :: me != HOST && !store_up
  fi;
  d_step { verdict[me] = found; found = 0; report[me] = 0 }
  goto known;
store_gone:
  atomic {
    if
    :: HOST < N -> verdict[me] = lost(HOST)
    :: else -> assert(false) /* the launcher outlives its children */
    fi;
    alone[me] = true;
    found = 0
  }
known:
#ifndef MUTANT_4 /* nobody ends a rank that is busy */
  if
  :: d_step { busy[me] && (me != HOST || acknowledged >= N - 1 || somebody_killed) -> end_rank(me) }
  fi
#else
  skip
#endif
}

/* The parent of --nproc: it tells the others of the first child that ended, and later ends those that are still there. */
proctype launcher() {
  byte r = 0;
  atomic {
    if
    :: !alive[0] -> r = 0
    :: !alive[1] -> r = 1
#if N > 2
    :: !alive[2] -> r = 2
#endif
#if N > 3
    :: !alive[3] -> r = 3
#endif
    fi
  }
  atomic {
    publish(lost(r));
    first_of_launcher = failure;
    r = 0
  }
#ifdef SIGKILL
  atomic { r = 0; do :: r < N -> end_rank(r); r++ :: else -> break od }
#endif
}

proctype killer() {
  byte r;
  do
  :: kills < KILLS ->
    atomic {
      if
      :: alive[0] -> r = 0
      :: alive[1] -> r = 1
#if N > 2
      :: alive[2] -> r = 2
#endif
#if N > 3
      :: alive[3] -> r = 3
#endif
      fi;
      kills++;
      end_rank(r);
      r = 0
    }
  :: break
  od
}

proctype judge() {
  byte r = 0;
  bool any = false;
  timeout ->
  atomic {
    do
    :: r < N -> any = any || !alive[r]; r++
    :: else -> break
    od;
    r = 0;
    do
    :: r < N && any ->
      /* Everybody ends. */
      assert(!alive[r]);
      /* The first cause is everybody's; without a store, its host is. */
      assert(verdict[r] == 0 || verdict[r] == failure || alone[r]);
      /* Who is cut off from the cause was cut off by a kill. */
      assert(!alone[r] || somebody_killed);
      /* A rank that threw is not called lost by anybody. */
      assert(somebody_killed || failure <= N);
      assert(somebody_killed || verdict[r] == failure || HOST == N);
      r++
    :: else -> break
    od;
    assert(HOST < N || !any || first_of_launcher == failure);
    r = 0
  }
}

init {
  byte r = 0;
  atomic {
    do
    :: r < N -> run rank(r); run watch(r); r++
    :: else -> break
    od;
    if
    :: HOST == N -> run launcher()
    :: else
    fi;
    run killer();
    run judge()
  }
}
