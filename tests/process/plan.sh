# chevron-plan on the command line: formats, exit codes, and for an unusable input one line that names value, flag and remedy.
# timeout: 400
seconds=60
. "$(dirname "$0")/shared/expect_plan.sh"

expect 0 'makespan 51   bubble  5.9 %' show --schedule zbvzerobubble --ranks 4 --microbatches 8
expect 0 'span     48   bubble  0.0 %' show ZBVZeroBubble
expect 0 '"makespan": 49' show ZB-H1 --forward 2 --backward-input 2,2,2,2 --format json
expect 0 'steady   48   bubble  0.0 %' show ZBVZeroBubble
expect 0 '^   3         48               3        0          0                8$' show ZBVZeroBubble
expect 0 '0F0 .* 1F0 .* 2F0 .* 3F0 .* 3W7 (48 on rank 3)$' show ZBVZeroBubble
expect 0 'messages: 48, 192 MiB' show 1F1B --message-bytes 4MiB
expect 0 ' 1.5 GiB$' show 1F1B --activation-bytes 1.5GiB
expect 0 '^3 steps back to back: 75, or 25 each' show ZB-H2 --steps 3
expect 0 '"makespan_of_steps": 75' show ZB-H2 --steps 3 --format json
expect 0 '"steady_step_time": 24' show ZB-H2 --format json
expect 0 'F7.*+b3' show DualPipeV --microbatches 10 --width 130
expect 0 'makespan 12 ' show 1F1B --ranks 2 --microbatches 2 --communication 1.5
expect 0 'makespan 15 ' show 1F1B --ranks 3 --microbatches 2 --communication 1,0.5
expect 0 '^critical path, 6 actions and 3 for messages' show 1F1B --ranks 2 --microbatches 2 --communication 1.5
expect 0 'communicates ' show 1F1B --communication 0.5 --communication-occupies sender
expect 0 '"communication_occupies": "both"' show 1F1B --communication 0.5 --communication-occupies Both --format json
expect 0 '"backward_input": \[0, 1, 1, 1\], "backward_weight": \[2, 1, 1, 1\]' show ZB-H1 --no-first-input-gradient --format json
expect 0 'makespan 44 ' show DualPipeV --hidden 1
expect 0 '^ForwardOnly ' show forwardonly
expect 0 '"action": "0F0"' show 1F1B --format json
expect 0 'polyline' show 1F1B --format svg --critical-path
expect 0 '^ZB-H1 .* 48 *6 MiB *96 MiB$' compare --message-bytes 2MiB --activation-bytes 1.5MiB
expect 0 'a message .5, during which its sender computes nothing' compare --communication .5 --communication-occupies sender
# Links: latency beside the transfer, a wire that carries one transfer at a time, one link that is slower.
expect 0 'makespan 15 ' show 1F1B --ranks 2 --microbatches 2 --communication 1 --latency 2
expect 0 'makespan 9.4 ' show 1F1B --ranks 2 --microbatches 2 --message-bytes 1MB --bandwidth 5GB/s
expect 0 'makespan 24 ' show GPipe --ranks 2 --microbatches 3 --message-bytes 3 --bandwidth 1
expect 0 'makespan 18 ' show GPipe --ranks 2 --microbatches 3 --message-bytes 3 --bandwidth 1 --communication-occupies nobody
expect 0 'makespan 15 ' show 1F1B --ranks 2 --microbatches 2 --communication 1 --link 1-0=2ms
expect 0 '"communication": \[1, 8, 1\], "latency": \[0.02, 3, 0.02\], "communication_occupies": "wire"' \
  show 1F1B --message-bytes 1MB --bandwidth 8Gbit/s --latency 20us --link 1-2=3ms:1Gbit/s --format json
expect 0 '"communication": \[0, 1, 0, 0, 0, 1, 0\], ' show ZBVZeroBubble --message-bytes 4 --link 1-2=0:4 --format json
expect 0 '^1F1B+1@3-4 .* 215 ' compare --ranks 8 --microbatches 64 --link 3-4=1
expect 0 'peak chunks: 6 5 3 2 1 ' show 1f1b+1@1-2 --ranks 5
# Slices: costs are those of whole microbatches, slices take equal time, and the first ones are the longest.
long="--ranks 8 --microbatches 16 --attention .5 --backward-input 2 --backward-weight 0"
expect 0 'makespan 13.5 ' show Seq1F1B --ranks 4 --microbatches 3 --slices 2
expect 0 'makespan 53.25 ' show Seq1F1B $long --slices 4
expect 0 'makespan 72.0938 ' show Seq1F1B $long --slices 4 --slice-ends equal
expect 0 'makespan 53.25 ' show Seq1F1B $long --slices 4 --slice-ends 0.3660254,0.6180340,0.8228757,1
expect 0 '^   0 .* 11 *2.98406$' show Seq1F1B $long --slices 4
expect 0 '^4 slices end at 0.366025 0.618034 0.822876 1 of' compare $long --slices 2,4
expect 0 '^Seq1F1B .* 2.98406 .* 4$' compare $long --slices 2,4
expect 0 '^Seq1F1B,1,58.5,.*,2,$' compare $long --slices 2,4 --format csv
expect 0 'slices in their order, backwards in reverse' check Seq1F1B --slices 3
expect 0 '0SEND_F0.1 *to rank 1' lower Seq1F1B --ranks 2 --microbatches 2 --slices 2
expect 0 '^0F0.0,0F0.1,0F1.0,0B0.1,' show Seq1F1B --ranks 2 --microbatches 2 --slices 2 --format csv
expect 0 '"peak_share": \[1.5, 1\]' show Seq1F1B --ranks 2 --microbatches 2 --slices 2 --format json
expect 0 'linear .* optimal ' search --ranks 2 --microbatches 2 --slices 2 --memory-limit 1.5 --trials 100
expect 0 'SeqZB-H1 k=4  ' fit --ranks 4 --slices 2,4 --memory 40GiB --static-bytes 20GiB --activation-bytes 4GiB --trials 10
expect 0 '^slices: take 8 with SeqInterleaved1F1B, the fewest within 2.0 % of the shortest; whole sequences take 8.9 % more (Inter' \
  compare --ranks 8 --microbatches 8 --slices auto --attention 0.4 --latency 0.05
expect 0 '^slices: take 1 with ZB-H1, .*; 2 slices take 0.5 % less (SeqZB-H1), 4 slices 0.7 % less' \
  compare --ranks 2 --microbatches 32 --slices auto --communication 0.05 --communication-occupies both
expect 0 '^makespan 51.765 ' show SeqZB-H1 --slices 4 --ranks 8 --microbatches 16 --attention 0.5
expect 0 'SeqZB-H1 k=8  ' fit --ranks 4 --slices auto --memory 40GiB --static-bytes 20GiB --activation-bytes 4GiB --trials 10
expect 2 '--slices auto is chosen by comparing, .*: give a number, such as the one that compare --slices auto recommends' show Seq1F1B --slices auto
expect 2 '--slices auto is chosen by comparing' search --slices auto
expect 5 "2B0.2 comes before 2F0.2, which it needs; a schedule of slices runs slices - 1 forwards more" check 1F1B --slices 3
expect 2 'a building block repeats whole microbatches: slices must be 1, not 2' show V-Half --slices 2
expect 2 "--slice-ends '0.5,0.4' do not rise" show Seq1F1B --slices 2 --slice-ends 0.5,0.4
expect 2 "--slice-ends '0.5,0.9' do not end at 1" show Seq1F1B --slices 2 --slice-ends 0.5,0.9
expect 2 "--slice-ends has no effect without --slices" show Seq1F1B --slice-ends 0.5,1
expect 2 "--attention has no effect without --lengths or --slices" show 1F1B --attention 0.5
expect 2 "--slices '0' is not usable" compare --slices 2,0
expect 2 "--slices does not go with --order" search --slices 2 --order --lengths 1,2,3,4,5,6,7,8
expect 2 "--memory-limit 1.2: no order was found that keeps it" \
  search --ranks 2 --microbatches 2 --slices 2 --attention .9 --memory-limit 1.2 --trials 100
expect 0 '^0F0,0F1,0B0,0B1$' show GPipe --ranks 1 --microbatches 2 --format csv
expect 0 '"ph": "X"' show 1F1B --format trace
expect 0 '<!doctype html>' show 1F1B --format HTML
expect 0 '^Step 00: 0F0 ' show 1F1B --format steps
expect 0 '^ok: Interleaved1F1B, 4 ranks' check interleaved1f1b --chunks 3
expect 0 '0SEND_F0 *to rank 1' lower 1F1B --ranks 2 --microbatches 2
expect 0 '/\* rank 0, 2: 0SEND_F0 \*/' lower 1F1B --ranks 2 --microbatches 2 --format promela
expect 5 "broken law 'in_flight': rank 0, step 3: 0F3 makes 4 chunks in flight, the declared limit is 3" check GPipe --memory-limit 3
expect 5 "broken law 'in_flight'" show GPipe --memory-limit 3 --format svg

expect 2 "no command given: choose one of show, compare, check, lower"
expect 2 "'shw' is not a command" shw
expect 2 "no schedule given: add --schedule FILE.csv or --schedule NAME, one of GPipe" show
expect 2 "'zbvzero' is not known; did you mean ZBVZeroBubble?" show zbvzero
for name in ZB-V zb_v; do expect 0 '^ZBVZeroBubble  ' show $name; done
expect 2 "'1f1p' is not known; did you mean 1F1B?" check --schedule 1f1p
expect 2 "'nothing-like-it' is not known: choose one of GPipe" show nothing-like-it
expect 2 "--ranks '0' is not usable: give a whole number from 1" show 1F1B --ranks 0
expect 2 "--microbatches '8x' is not usable" show 1F1B --microbatches 8x
expect 2 "--chunks 2 does not go with 1F1B" show 1F1B --chunks 2
expect 2 "--forward '1,2' has 2 values, but the schedule has 4 stages" show 1F1B --forward 1,2
expect 2 "--communication '-1' is not a time" show 1F1B --communication=-1
expect 2 "--forward '1e-300' is below 1e-9: give costs in a smaller unit, or 0" show 1F1B --forward 1e-300
expect 0 "^makespan 1.5e-08 " show 1F1B --ranks 1 --microbatches 5 --forward 1e-9 --backward-input 1e-9 --backward-weight 1e-9
expect 2 "--communication '1,2' has 2 values, but the schedule has 3 boundaries between stages: give one for all, or 3" show 1F1B --communication 1,2
expect 2 "--communication-occupies 'me' is not known: choose one of nobody, sender, receiver, both" show 1F1B --communication-occupies me
expect 2 "--link '3-4' is not usable: it is not RANK-RANK=LATENCY; give ranks and a latency" show 1F1B --link 3-4
expect 2 "--link '3-3=1' is not usable: a link joins two ranks" show 1F1B --link 3-3=1
expect 2 "--link '3-4=1' joins a rank that is not there: there are 4, counted from 0" show 1F1B --link 3-4=1
expect 2 "--link 1-2=1d: latency '1d' is not a time: give a number in the costs' unit" show 1F1B --link 1-2=1d
expect 2 "a bandwidth alone does not say how long a transfer takes: add --message-bytes" show 1F1B --link 1-2=1:5GB/s
expect 2 "--bandwidth '5GB/h' is not a bandwidth: give bytes in" show 1F1B --bandwidth 5GB/h --message-bytes 4
expect 2 "--bandwidth and --communication both say how long" show 1F1B --bandwidth 5 --message-bytes 4 --communication 1
expect 2 "--latency '1,2' has 2 values, but the schedule has 3 boundaries" show 1F1B --latency 1,2
expect 2 "--latency '1,2,3' is a list, but schedules cut the model" compare --latency 1,2,3
expect 2 "there is none after rank 7" show 1F1B+1@7-8 --ranks 8
expect 2 "slack for slow links is written as in 1F1B+1@3-4, one forward more before the link" show GPipe+1@3-4
expect 2 "--hidden '1.5' is not a share: give a number from 0 to 1" show 1F1B --hidden 1.5
expect 2 "--message-bytes '4x' is not a size: give bytes up to 16GiB, such as" compare --message-bytes 4x
expect 2 "--activation-bytes '17GiB' is not a size" show 1F1B --activation-bytes 17GiB
expect 2 "--activation-bytes '1,2,3' has 3 values" show 1F1B --activation-bytes 1,2,3
expect 2 "--steps '0' is not usable: give a whole number from 1 to 8191" show 1F1B --steps 0
expect 2 "--steps 2 does not go with --format csv" show 1F1B --steps 2 --format csv
expect 2 "--critical-path does not go with --format text" show 1F1B --critical-path
expect 2 "--format 'sgv' is not known; did you mean svg?" show 1F1B --format sgv
expect 2 "-o '/nowhere/x.svg' cannot be written (No such file or directory)" show 1F1B -o /nowhere/x.svg
expect 2 "'1,2' is a list, .* or add --chunks" compare --forward 1,2
expect 2 "'1,2' is a list" compare --activation-bytes 1,2
expect 2 "--forward '1,2,3' has 3 values, but the schedule has 4 stages" compare --ranks 2 --chunks 2 --forward 1,2,3
expect 0 '^2 ranks, 4 microbatches. A stage costs F=1,2,1,3 I=1 W=.5, a message 1,0,2.$' compare --ranks 2 --microbatches 4 --chunks 2 --forward 1,2,1,3 --backward-weight .5 --communication 1,0,2
expect 0 '^ZBVZeroBubble  *2  *12.5 ' compare --ranks 2 --microbatches 4 --chunks 2 --forward .5,.5,.5,.5 --backward-input .5 --backward-weight .5
expect 2 "-o 'timeline.sgv': .sgv says no format this command has: choose one of text, svg, html" show 1F1B -o timeline.sgv
expect 2 "-o 'table.svg': .svg says no format this command has: choose one of text, csv, json" compare -o table.svg
for file in without_an_ending words.txt; do
  "$plan" show 1F1B -o $file
  grep -q '^1F1B  *4 ranks' $file || { cat $file; failed=1; }
done
expect 0 '^InterleavedZeroBubble  *interleaved_zero_bubble  *any, else 2  ' list
expect 0 'bubble 100.0 %' show 1F1B --communication 1e12
# Flags stand under headings, none of them long.
for command in show compare search fit; do
  "$plan" $command --help > output
  for heading in Size Costs "Links between ranks" Bytes Lengths Output; do
    [ "$(grep -c "^$heading:$" output)" -eq 1 ] || { echo "chevron-plan $command --help: not one heading $heading"; failed=1; }
  done
  longest=$(awk '/^[A-Z].*:$/ { n = 0 } /^  -/ { if (++n > most) most = n } END { print most }' output)
  [ "$longest" -le 12 ] || { echo "chevron-plan $command --help: $longest flags under one heading"; failed=1; }
done
expect 2 "^chevron-plan: --bogus was not expected: there is no such flag. chevron-plan --help-all" compare --bogus
expect 2 "'--ranks' stands before the command: give flags after it" --ranks 8 show 1F1B
expect 2 "--micro was not expected: there is no such flag; did you mean --microbatches?" compare --micro 4
expect 2 "'ZB-H1' is no CSV file" compare ZB-H1 mine.csv

# Schedules from files, in PyTorch's CSV: compute only, and with communication in both dialects.
"$plan" show ZBVZeroBubble --ranks 2 --microbatches 4 --format csv -o mine.csv
expect 0 '^ok: mine.csv, 2 ranks' check mine.csv
expect 0 'makespan 25 ' show --schedule mine.csv
expect 0 '^mine.csv  *2  *12.5' compare mine.csv
expect 0 '^"mine.csv",2,12.5' compare mine.csv --format csv
expect 0 '^0F0,0SEND_F0,' lower ./mine.csv --format csv-comms
for dialect in csv-comms csv-comms-2.15; do
  "$plan" lower mine.csv --format $dialect -o lowered.csv
  expect 0 "The file's own messages keep" check lowered.csv
  "$plan" lower lowered.csv --format csv | diff mine.csv - || failed=1
  # A receive too late for the order of its edge: the next message of the edge is posted before it.
  sed 's/1RECV_F0,1F0,1RECV_F1/1RECV_F1,1RECV_F0,1F0/' lowered.csv > swapped.csv
  expect 5 "broken law 'matched': swapped.csv, line 2, column 1: rank 1, step 0: 1RECV_F1 is posted where this edge delivers 1RECV_F0; 1RECV_F0 is at line 2, column 10" check swapped.csv
done
grep -q '1WAIT_SEND_B3' lowered.csv || { echo "no waits for PyTorch 2.15"; failed=1; }
sed 's/0SEND_F0,//; s/0WAIT_SEND_F0,//' lowered.csv > unsent.csv
expect 5 "0F0 makes a message that this rank never sends: there is no 0SEND_F0" check unsent.csv
printf '0F0,0B0\r\n1B0,1F0\r\n' > early.csv
expect 5 "broken law 'order': early.csv, line 2, column 1: rank 1, step 0: 1B0 comes before 1F0, which it needs; 1F0 is at line 2, column 5" check early.csv
expect 5 "broken law 'order'" show early.csv
expect 5 "broken law 'order'" lower early.csv
expect 0 'early.csv   line 2, column 1: rank 1' compare early.csv
printf '0F0,0B0,1023F65534\n' > absurd.csv
expect 5 "broken law 'complete': absurd.csv, line 1, column 9" check absurd.csv
expect 5 "broken law 'complete': absurd.csv, line 1, column 9" compare absurd.csv
# Own actions: declared by the first line, or as found.
printf '# own actions: X after=W every\n0F0,0I0,0W0,0X0\n' > declared.csv
printf '0Y0,0F0,0B0\n' > found.csv
expect 0 'X is an own action, in the place that the schedule declares' check declared.csv
expect 0 'Y is an own action: it may stand anywhere, once for a stage and microbatch' check found.csv
expect 0 '^# own actions: X after=W every$' show declared.csv --format csv
expect 0 '0X0' show declared.csv --format csv
expect 0 '^found.csv .* 3 ' compare declared.csv found.csv
expect 0 '^declared.csv .* 3 ' compare declared.csv found.csv
expect 2 "mine.csv has 2 ranks and 4 microbatches, found.csv 1 and 1: compare schedules of one size" compare found.csv mine.csv
printf '# own actions: X after=W\n0F0,0I0,0X0,0W0\n' > early_x.csv
expect 5 "broken law 'order': early_x.csv, line 2, column 9: rank 0, step 2: 0X0 comes before 0W0, which it needs" check early_x.csv
expect 2 "'# by hand': a line that begins with # declares X, Y and Z" check /dev/stdin <<'END'
# by hand
0F0,0B0
END
expect 0 '^  Channels: proved for group, batched, pair and edge, of the messages that lower --format csv-comms writes; a send may last until its receive.$' check mine.csv
# Messages over channels: pytorch#172668, in which each rank enqueues a send to the other before its receive.
cat > both_send.csv <<'END'
0F0,0SEND_F0,0F1,0SEND_F1,2RECV_F0,2F0,2SEND_F0,2RECV_F1,2F1,2SEND_F1,2RECV_B0,2B0,2SEND_B0,2RECV_B1,2B1,2SEND_B1,0RECV_B0,0B0,0RECV_B1,0B1
1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1,3RECV_F0,3F0,3B0,3SEND_B0,3RECV_F1,3F1,3B1,3SEND_B1,1RECV_B0,1B0,1SEND_B0,1RECV_B1,1B1,1SEND_B1
END
expect 0 '^  Channels: proved for batched and edge, not for group and pair; a send may last until its receive.$' check both_send.csv
expect 0 '^    pair: line 1, column 18: rank 0, step 3: 0SEND_F1 waits for 1RECV_F1, which is queued on rank 1 behind 1SEND_F0' check both_send.csv
expect 0 '^  Channels: proved for edge;' check both_send.csv --channels edge
expect 5 "^broken law 'deadlock': both_send.csv, line 1, column 18: .*; channels: pair. On the channel of ranks 0 and 1 rank 1 enqueues 1SEND_F0 before 1RECV_F1" check both_send.csv --channels pair
expect 5 "channels: group. On the channel of all ranks rank 1 enqueues" check both_send.csv --channels GROUP
expect 0 'proved for batched, not for group, pair and edge; a rank waits at each message until it has ended' check both_send.csv --hosts-wait
expect 5 "channels: edge, hosts wait. Remedy: calls that do not wait" check both_send.csv --hosts-wait --channels edge
expect 0 'proved for pair; a send of fewer bytes than 1KiB ends without its receive, all others may last until theirs' check both_send.csv --channels pair --buffered-below 1KiB --message-bytes 1000
expect 5 "channels: pair" check both_send.csv --channels pair --buffered-below 1KiB --message-bytes 1KiB,1KiB,64
expect 2 "--buffered-below 1KiB needs the sizes of messages: add --message-bytes" check both_send.csv --buffered-below 1KiB
expect 2 "--channels 'pear' is not known; did you mean pair?" check both_send.csv --channels pear
expect 0 'proved for group, of the messages that lower' check 1F1B --channels group
expect 0 'Channels: pair' lower 1F1B --ranks 2 --microbatches 2 --format promela --channels pair
expect 2 "--channels pair of lower is for --format promela: add it, or ask check --channels" lower 1F1B --channels pair
expect 2 "--hosts-wait of lower is for --format promela: add it, or ask check --hosts-wait" lower 1F1B --hosts-wait
expect 2 "--buffered-below 1KiB needs the sizes of messages: add --message-bytes" lower 1F1B --format promela --buffered-below 1KiB
expect 0 'Sends are rendezvous from 1024 bytes on; .* Channels: edge; a rank waits' lower 1F1B --ranks 2 --microbatches 2 --format promela --hosts-wait --buffered-below 1KiB --message-bytes 1000
# Gathers of stages under FSDP.
"$plan" lower ZBVZeroBubble --ranks 2 --microbatches 4 --format csv-comms --resident 1 -o fsdp.csv
expect 0 '^  resident      at most 1 stages of a rank gathered at once, by [1-9][0-9]* UNSHARD; [1-9][0-9]* of them with no computation' check fsdp.csv --resident 1
expect 0 '^0UNSHARD,3UNSHARD,0F0,' lower mine.csv --format csv-comms-2.15 --resident 2
"$plan" lower mine.csv --format csv-comms --resident 2 -o whole.csv
expect 5 "broken law 'resident': whole.csv, line 1, column [0-9]*: rank 0: 3UNSHARD gathers one stage more than .*; the limit is 1" check whole.csv --resident 1
sed 's/^0UNSHARD,//' fsdp.csv > absent.csv
expect 5 "broken law 'resident': absent.csv, line 1, column 1: rank 0: 0F0 runs while its stage is not gathered. Remedy: .*0UNSHARD" show absent.csv
expect 2 "--resident 1 is too few: rank 0, step [0-9]*: .* runs as a pair, whose halves need two stages" lower DualPipeV --format csv-comms --resident 1
expect 2 "--resident '0' is not usable: give a whole number from 1 to 1024" lower 1F1B --format csv-comms --resident 0
expect 2 "--resident 2 is for --format csv-comms or csv-comms-2.15" lower 1F1B --resident 2
expect 2 "--resident 2 is for a file with UNSHARD and RESHARD, and mine.csv has none" check mine.csv --resident 2
expect 2 "--resident 2 is for a file with UNSHARD and RESHARD, and 1F1B has none" check 1F1B --resident 2
# Schedules through pipes.
for from in - /dev/stdin; do
  "$plan" show 1F1B --ranks 2 --microbatches 2 --format csv | timeout 20 "$plan" check $from | grep -q "^ok: $from, 2 ranks" || { echo "no schedule from $from"; failed=1; }
done
mkfifo pipe.csv
cat mine.csv > pipe.csv &
expect 0 '^ok: pipe.csv, 2 ranks' check pipe.csv
for flag in --help --version; do
  code=0
  "$plan" $flag > /dev/full 2> errors || code=$?
  if [ $code -ne 2 ] || ! grep -q 'standard output cannot be written' errors; then echo "$flag > /dev/full: $code"; cat errors; failed=1; fi
done
printf '0F0,0B0\n1F0x,1B0\n' > junk.csv
expect 2 "'junk.csv', line 2, column 1: '1F0x' goes on after its microbatch" check junk.csv
expect 2 "'junk.csv', line 2, column 1" show junk.csv
expect 2 "'junk.csv', line 2, column 1" compare junk.csv
: > empty.csv
expect 2 "line 1, column 1: nothing is here" check empty.csv
expect 2 "'nowhere.csv' cannot be read (No such file or directory)" check nowhere.csv
expect 2 "'/dev/zero' is not a file" check /dev/zero
expect 2 "'./' is not a file" check ./
expect 2 "--ranks 3 does not go with mine.csv, which has 2" check mine.csv --ranks 3
expect 2 "--microbatches 8 does not go with mine.csv, which has 4" show mine.csv --microbatches 8
expect 2 "'1F1B' is no CSV file" compare 1F1B
expect 5 "broken law 'in_flight': mine.csv, line 1, column 13: rank 0, step 3: 3F0 makes 4" check mine.csv --memory-limit 1.5
# One rank with two stages, one with one: pictures of all sorts.
printf '0F0,0F1,2F0,2B0,2F1,2B1,0B0,0B1\n1F0,1F1,1B0,1B1\n' > uneven.csv
for format in text svg html trace json steps csv; do expect 0 . show uneven.csv --format $format; done
expect 0 '^ok: uneven.csv' check uneven.csv

# The ending of the file decides the format; a file holds no escape sequences, nor does a pipe.
"$plan" show 1F1B -o t.svg
"$plan" show 1F1B > /dev/full 2> full && failed=1
grep -q "standard output cannot be written" full || { echo "a full disk is not noticed"; failed=1; }
head -c 5 t.svg | grep -q '^<svg ' || { echo "t.svg is no SVG"; failed=1; }
# Files that are too large for their kind, or for the memory of the process.
truncate -s 300M big.json
expect 2 "--profile 'big.json' is larger than 1 MiB, and nothing of its kind is: name a file that chevron-train" show 1F1B --profile big.json
yes 0F0, | head -c 25000000 | tr -d '\n' > cells.csv
if (ulimit -v 30000 && "$plan" list > /dev/null 2>&1); then
  code=0
  (ulimit -v 30000 && exec "$plan" check cells.csv) > output 2> errors || code=$?
  if [ $code -ne 1 ] || ! grep -q "there is too little memory for this: --schedule cells.csv" errors; then
    echo "too little memory: exit code $code, not 1, or no word about the file:"
    cat errors
    failed=1
  fi
fi
if "$plan" show 1F1B | grep -q "$(printf '\033')"; then echo "escape sequences in a pipe"; failed=1; fi
"$plan" show 1F1B --colour always | grep -q "$(printf '\033')" || { echo "--colour always gives no colour"; failed=1; }

# docs/reference/schedules.md shows the list and the comparison as they are printed.
"$plan" compare --ranks 4 --microbatches 8 > compared
sed -n '/chevron-plan compare --ranks 4 --microbatches 8$/,/^```$/p' "${CHEVRON_SOURCE:?}/docs/reference/schedules.md" | sed '1d; $d' | diff - compared || failed=1
"$plan" list > listed
sed -n '/chevron-plan list$/,/^```$/p' "${CHEVRON_SOURCE:?}/docs/reference/schedules.md" | sed '1d; $d' | diff - listed || failed=1

# The table and lists of costs: a list that says the same as one number gives the same.
"$plan" compare --ranks 2 --chunks 2 --format csv | grep '^[^,]*,2,' > by_rank
"$plan" compare --ranks 2 --chunks 2 --format csv --forward .5,.5,.5,.5 --backward-input .5 --backward-weight .5 > by_stage
grep -q '^GPipe,,.*has 2 stages; the costs given are those of 4' by_stage || { cat by_stage; failed=1; }
grep '^[^,]*,2,' by_stage | diff by_rank - || failed=1
grep -q '^ZBVZeroBubble,2,' by_rank || { echo "compare --chunks 2 lacks ZBVZeroBubble"; failed=1; }

# Fastest first; the published makespans at 4 ranks, 8 microbatches and equal costs; a schedule that needs too much memory has the reason.
"$plan" compare --format csv --memory-limit 4 > table.csv
grep -E '^(schedule|GPipe|1F1B|LoopedBFS|Interleaved1F1B|InterleavedZeroBubble|ZB-H1|ZB-H2|ZBVZeroBubble),' table.csv | cut -d, -f1-3 > columns
printf '%s\n' schedule,chunks,makespan InterleavedZeroBubble,2,25.5 ZBVZeroBubble,2,25.5 ZB-H1,1,27 1F1B,1,33 GPipe,, LoopedBFS,, Interleaved1F1B,, \
  ZB-H2,, > wanted
diff wanted columns || failed=1
grep -q 'GPipe,.*"peak 8 is above the limit of 4"' table.csv || { cat table.csv; failed=1; }
# Where a step has few microbatches, the command that is printed finds a shorter schedule in the same memory.
for name in ZBVZeroBubble ZB-H2 DualPipeV; do
  expect 0 "^search finds [0-9.]* within this memory: chevron-plan search --ranks 8" show $name --ranks 8 --microbatches 4
  again=$(sed -n 's/^search finds .* within this memory: chevron-plan //p' output)
  length=$(sed -n 's/^search finds \([0-9.]*\) within.*/\1/p' output)
  expect 0 "^[a-z]*  *$length " $again
done
expect 0 "^search finds, within a schedule's memory, .* in that of ZBVZeroBubble" compare --ranks 8 --microbatches 4
again=$(sed -n "s/^search finds, .* in that of [^ ]*: chevron-plan //p" output)
length=$(sed -n "s/^search finds, within a schedule's memory, \([0-9.]*\) .*/\1/p" output)
expect 0 "^[a-z]*  *$length " $again
for shown in "ZB-H1 --ranks 4" "V-Min --ranks 8"; do
  "$plan" show $shown --microbatches 4 > shown
  ! grep -q "^search finds" shown || { echo "${shown%% *} is as short as can be"; failed=1; }
done
exit $failed
