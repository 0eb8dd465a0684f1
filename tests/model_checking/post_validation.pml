/* Post-validation: run/train/step_end.hpp (run, verdict, undo), step_policy.hpp (is_stable, certainly_wrong),
   run/train/trainer.hpp (run_program) and run/execute/executor.hpp (run_ahead, withdraw, finish) with speculation.hpp.

   P ranks in a chain make STEPS steps. In each step any rank's numbers may make the step wrong: so that the rank can tell
   (`knows`), or so that only the numbers of all do (`adds`). All numbers are gathered; a wrong step is left out or clipped, alike
   on all ranks. A rank that relies on the step takes it at once and goes on: it runs its first forwards on the new parameters,
   AHEAD + P - 1 - r of them, and sends what they make. Then it waits for the gather. If the step was wrong it puts its copy back,
   does what is right, takes the messages of its forwards off the channel, and starts over.

   Parameters are what was done to them: a number to base 4, a digit a step (1 as it is, 2 corrected). A message says the
   parameters that it was made with. */

#ifndef P
#define P 3
#endif
#ifndef STEPS
#define STEPS 3
#endif
#ifndef STABLE
#define STABLE 1 /* steps in order before a rank relies on the next */
#endif
#ifndef AHEAD
#define AHEAD 1
#endif
#define ALL (AHEAD + P) /* microbatches */

byte brought[STEPS];        /* ranks whose numbers are in the gather */
bool some_wrong[STEPS];
byte reference;             /* what the synchronous optimizer makes of the parameters, step by step */
byte reference_at[STEPS];
byte ended;
chan forward[P] = [2 * ALL] of { byte }; /* to rank r, from r - 1 */

inline bring_numbers(s, mine) {
  d_step {
    brought[s]++;
    some_wrong[s] = some_wrong[s] || mine;
    if
    :: brought[s] == P ->
      reference = reference * 4 + 1 + some_wrong[s];
      reference_at[s] = reference
    :: else
    fi
  }
}

/* Forwards [from, to) of this rank. */
inline run_forwards(from, to) {
  i = from;
  do
  :: i < to ->
    if
    :: me > 0 ->
      forward[me] ? got;
      assert(got == parameters) /* no message of a beginning that was taken back */
    :: else
    fi;
    if
    :: me < P - 1 -> forward[me + 1] ! parameters
    :: else
    fi;
    i++
  :: else -> break
  od;
  i = 0; got = 0
}

proctype rank(byte me) {
  byte s = 0, i = 0, got = 0, parameters = 0, before = 0, in_order = 0;
  bool pending = false, stepped = false, mine = false;
  do
  :: s < STEPS || pending ->
    if
    :: pending ->
      if
      :: s < STEPS -> run_forwards(0, AHEAD + P - 1 - me)
      :: else
      fi;
      /* The verdict. */
#ifdef MUTANT_1 /* from its own numbers, without waiting */
      skip;
#else
      brought[s - 1] == P;
#endif
      pending = false;
      if
#ifdef MUTANT_1
      :: mine ->
#else
      :: some_wrong[s - 1] ->
#endif
#ifndef MUTANT_2 /* it has no copy */
        parameters = before * 4 + 2;
#else
        parameters = (stepped -> parameters : before * 4) + 2 - 2 * stepped;
#endif
        in_order = 0;
        if
        :: s < STEPS && me > 0 -> /* what rank me - 1 sent, and this one has not taken: one message */
#ifndef MUTANT_3 /* it leaves them on the channel */
          forward[me] ? got;
          got = 0
#else
          skip
#endif
        :: else
        fi;
        if
        :: s < STEPS -> run_forwards(0, ALL)
        :: else
        fi
      :: else ->
        if
        :: !stepped -> parameters = before * 4 + 1
        :: else
        fi;
        in_order = (in_order < STABLE -> in_order + 1 : STABLE);
        if
        :: s < STEPS -> run_forwards(AHEAD + P - 1 - me, ALL)
        :: else
        fi
      fi
    :: else -> run_forwards(0, ALL)
    fi;
    stepped = false;
    before = 0;
    mine = false;
    if
    :: s == STEPS -> break
    :: else
    fi;
    /* All that came before is settled, as the synchronous optimizer would have it. */
    assert(s == 0 || parameters == reference_at[s - 1]);
    /* The end of the step. */
    if
    :: mine = false
    :: mine = true
    fi;
    if
    :: in_order < STABLE -> /* it waits for all */
      bring_numbers(s, mine);
      brought[s] == P;
      parameters = parameters * 4 + 1 + some_wrong[s];
      in_order = (some_wrong[s] -> 0 : (in_order < STABLE -> in_order + 1 : STABLE));
      mine = false
    :: else ->
#ifdef MUTANT_4 /* who knows that the step is wrong brings nothing */
      if
      :: !mine -> bring_numbers(s, mine)
      :: else
      fi;
#else
      bring_numbers(s, mine);
#endif
      pending = true;
      before = parameters;
      if
      :: stepped = true; parameters = parameters * 4 + 1
      :: mine -> stepped = false; parameters = before * 4 + 1 /* certainly wrong: no step is made; what runs ahead is thrown away, so it may be numbered like the others' */
      fi;
#ifndef MUTANT_1
      mine = false
#endif
    fi;
    s++
  :: else -> break
  od;
  assert(parameters == reference_at[STEPS - 1]);
  assert(empty(forward[me])); /* the channels are empty */
  d_step { parameters = 0; in_order = 0; s = 0; ended++ }
}

init {
  byte r = 0;
  atomic {
    do
    :: r < P -> run rank(r); r++
    :: else -> break
    od
  }
  ended == P
}
