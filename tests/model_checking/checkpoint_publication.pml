/* How a checkpoint gets its name: checkpoint/checkpoint.hpp (save_checkpoint), checkpoint_folder.hpp (remove_files,
   remove_old_checkpoints, last_checkpoint) and safetensors.hpp (unnamed_file).

   P ranks, each with one file, save STEPS checkpoints; the last KEEP of them stay. Between any two system calls the job may be
   killed, or power may be lost, CRASHES times in all; then another job goes on from what it finds. With AGAIN it may begin by
   saving the step again that it went on from. With READER a reader loads at any moment.

   Contents are numbered by the job that wrote them: a manifest names the contents of all files, as its fingerprints do. What
   folders list is in memory (`now`) and on the disk. A folder comes to the disk at any moment, at the latest by bring_to_disk; a
   loss of power leaves what is there. With UNORDERED entries come one by one, in any order. Contents are on the disk before they
   have a name (fsync in unnamed_file). A collective call (`together`) is a barrier; a rank that dies ends its job. */

#ifndef P
#define P 2
#endif
#ifndef STEPS
#define STEPS 3
#endif
#ifndef KEEP
#define KEEP 1
#endif
#ifndef CRASHES
#define CRASHES 1
#endif

#define manifest P
#define standing 1 /* step-N */
#define removed  2 /* removed-step-N */
#define entry(c, what) ((c) * (P + 1) + (what))

byte now[STEPS * (P + 1)], disk[STEPS * (P + 1)];     /* 0: not there; else whose contents */
byte now_folder[STEPS], disk_folder[STEPS];
byte job = 1;
bool runs[CRASHES + 2];
byte first_step;     /* of this job */
byte published;      /* so many steps: the last save that has returned */
byte passed;         /* how often a rank has come to a barrier */
byte ended;
byte crashes;
byte gone;           /* ranks that died */
hidden byte i, k;

inline bring_to_disk(c) {
  d_step {
    i = 0;
    do
    :: i <= P && crashes < CRASHES -> disk[entry(c, i)] = now[entry(c, i)]; i++
    :: else -> break
    od
  }
}
inline bring_folders_to_disk() {
  d_step {
    i = 0;
    do
    :: i < STEPS && crashes < CRASHES -> disk_folder[i] = now_folder[i]; i++
    :: else -> break
    od
  }
}
#define is_last(c) (now_folder[c] == standing && now[entry(c, manifest)] != 0)

/* k becomes the number of the last whole checkpoint and 1; 0: there is none. In a d_step. */
inline last_checkpoint() {
  k = STEPS;
  do
  :: k > 0 && !is_last(k - 1) -> k--
  :: else -> break
  od
}

inline barrier() {
  passed++;
  came = came + P;
  passed >= came
}

proctype rank(byte me; byte mine) {
  byte s = first_step, came = 0, n = 0, kept;
  {
  do
  :: s < STEPS ->
    /* All files are written, without a name. */
    if
    :: me == 0 && now_folder[s] == 0 -> now_folder[s] = standing
    :: else
    fi;
    barrier();
    if
    :: me == 0 -> /* remove_files: what a checkpoint of this step had, its manifest first */
#ifdef MUTANT_5 /* its manifest last */
      n = 0;
      do
      :: n < P -> now[entry(s, n)] = 0; n++
      :: else -> break
      od;
#endif
      if
      :: now[entry(s, manifest)] != 0 ->
        now[entry(s, manifest)] = 0;
#ifndef MUTANT_6 /* the disk may list it still, beside new files */
        bring_to_disk(s)
#endif
      :: else
      fi;
      n = 0;
      do
      :: n < P && now[entry(s, n)] != 0 -> now[entry(s, n)] = 0; n++
      :: n < P && now[entry(s, n)] == 0 -> n++
      :: else -> break
      od;
      n = 0
    :: else
    fi;
    barrier();
#ifdef MUTANT_1 /* the manifest before the files */
    if
    :: me == 0 -> now[entry(s, manifest)] = mine
    :: else
    fi;
#endif
    now[entry(s, me)] = mine; /* give_name */
    barrier();
    if
    :: me == 0 ->
#ifndef MUTANT_2 /* the files' names may come to the disk after the manifest's */
      bring_to_disk(s);
#endif
      now[entry(s, manifest)] = mine;
#ifndef MUTANT_3 /* the older ones go while the new one is in memory only */
      bring_to_disk(s);
      bring_folders_to_disk();
      published = s + 1;
#endif
      /* remove_old_checkpoints: of the whole ones the last KEEP stay. Renamed first, then deleted, in no order. */
      kept = 0;
      n = s + 1;
      do
      :: n > 0 ->
        n--;
        if
        :: is_last(n) && kept < KEEP -> kept++
        :: is_last(n) && kept >= KEEP -> now_folder[n] = removed
        :: else
        fi
      :: else -> break
      od;
      kept = 0;
      n = 0;
      do
      :: n < s && now_folder[n] == removed ->
        do
        :: now[entry(n, manifest)] != 0 -> now[entry(n, manifest)] = 0
        :: now[entry(n, 0)] != 0 -> now[entry(n, 0)] = 0
        :: now[entry(n, P - 1)] != 0 -> now[entry(n, P - 1)] = 0
        :: else -> break
        od;
        n++
      :: n < s && now_folder[n] != removed -> n++
      :: else -> break
      od;
      n = 0;
#ifdef MUTANT_3
      bring_to_disk(s);
      bring_folders_to_disk();
      published = s + 1;
#endif
    :: else
    fi;
    barrier();
    s++
  :: else -> break
  od;
  ended++;
  came = 0
  } unless {
    d_step { !runs[mine] -> s = 0; came = 0; n = 0; kept = 0; gone++ } /* it is dead */
  }
}

/* The system writes when it likes. After the last crash nobody will ask what is on the disk. */
hidden byte c_of_disk;
proctype disks() {
#define c c_of_disk
  do
  :: atomic {
      crashes < CRASHES;
      select(c : 0 .. STEPS - 1);
      if
#ifdef UNORDERED
      :: now[entry(c, 0)] != disk[entry(c, 0)] -> disk[entry(c, 0)] = now[entry(c, 0)]
      :: now[entry(c, P - 1)] != disk[entry(c, P - 1)] -> disk[entry(c, P - 1)] = now[entry(c, P - 1)]
      :: now[entry(c, manifest)] != disk[entry(c, manifest)] -> disk[entry(c, manifest)] = now[entry(c, manifest)]
#else
      :: now[entry(c, 0)] != disk[entry(c, 0)] || now[entry(c, P - 1)] != disk[entry(c, P - 1)] ||
         now[entry(c, manifest)] != disk[entry(c, manifest)] -> bring_to_disk(c)
#endif
      :: now_folder[c] != disk_folder[c] -> disk_folder[c] = now_folder[c]
      fi
    }
  od
#undef c
}

inline forget_disk() {
  i = 0;
  do
  :: crashes == CRASHES && i < STEPS * (P + 1) -> disk[i] = 0; i++
  :: else -> break
  od;
  i = 0;
  do
  :: crashes == CRASHES && i < STEPS -> disk_folder[i] = 0; i++
  :: else -> break
  od
}

/* What a job finds that begins now. */
inline look() {
  last_checkpoint();
#ifndef AGAIN
  assert(k >= published);         /* what was saved is there, or a later one */
#else
  assert(k + 1 >= published);     /* or the one before: while a step is saved again its checkpoint is gone */
#endif
  i = 0;
  do
  :: k > 0 && i < P -> assert(now[entry(k - 1, i)] == now[entry(k - 1, manifest)]); i++ /* and it is whole */
  :: else -> break
  od
}

proctype world() {
  byte r;
  bool again = false;
  do
  :: crashes < CRASHES && ended == 0 ->
    if
    :: again = false
#ifdef AGAIN
    :: again = true
#endif
    fi;
    d_step {
      crashes++;
      runs[job] = false;
      job++;
      runs[job] = true;
      passed = 0;
      ended = 0;
      look();
      forget_disk();
      first_step = k;
      if
      :: again && k > 0 -> first_step = k - 1
      :: else
      fi;
      again = false
    }
    atomic { gone == crashes * P; r = 0; do :: r < P -> run rank(r, job); r++ :: else -> break od; r = 0 }
  :: crashes < CRASHES && ended == 0 -> /* the same with a loss of power */
    d_step {
      crashes++;
      runs[job] = false;
      job++;
      runs[job] = true;
      passed = 0;
      ended = 0;
      i = 0;
      do
      :: i < STEPS * (P + 1) -> now[i] = disk[i]; i++
      :: else -> break
      od;
      i = 0;
      do
      :: i < STEPS -> now_folder[i] = disk_folder[i]; i++
      :: else -> break
      od;
      look();
      forget_disk();
      first_step = k
    }
    atomic { gone == crashes * P; r = 0; do :: r < P -> run rank(r, job); r++ :: else -> break od; r = 0 }
  :: break
  od;
  timeout ->
  d_step {
    assert(ended == P);
    look();
    assert(k == STEPS);
    r = 0;
    k = 0;
    do
    :: k < STEPS -> r = r + (is_last(k) -> 1 : 0); k++
    :: else -> break
    od;
    /* The last KEEP stay; where the last job had nothing left to save, what its predecessor had not removed stays, too. */
#ifndef AGAIN
    assert(r >= (KEEP < STEPS -> KEEP : STEPS));
#endif
    assert(r <= KEEP || first_step == STEPS)
  }
}

/* Loads once, at any moment, file by file; names what it reads by the path. */
proctype reader() {
  byte c, wanted = 0, n = 0;
  bool refused = false;
  d_step {
    last_checkpoint();
    if
    :: k > 0 -> c = k - 1; wanted = now[entry(c, manifest)]
    :: else -> n = P /* there is none */
    fi
  }
  do
  :: n < P ->
    d_step {
#ifdef MUTANT_4 /* it does not compare fingerprints */
      refused = refused || now_folder[c] != standing || now[entry(c, n)] == 0;
      assert(refused || now[entry(c, n)] == wanted);
#else
      refused = refused || now_folder[c] != standing || now[entry(c, n)] != wanted;
#endif
      n++
    }
  :: else -> break
  od;
  /* Without a crash it is refused only what is being removed, or saved again. */
  assert(!refused || published > c || crashes > 0)
}

init {
  byte r = 0;
  atomic {
    runs[1] = true;
    do
    :: r < P -> run rank(r, 1); r++
    :: else -> break
    od;
    run disks();
#ifdef READER
    run reader();
#endif
    run world()
  }
}
