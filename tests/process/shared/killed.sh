# kill_all <process>: kills a launcher and its ranks at once, and comes back when all are gone.
kill_all() {
  children=$(ps -o pid= --ppid "$1" || true)
  kill -9 "$1" $children 2> /dev/null || true
  wait "$1" 2> /dev/null || true
  for child in $children; do
    # A killed process may take a moment to end, and remains a zombie until its parent waits for it.
    while grep -q '^State:[[:space:]]*[^ZX]' "/proc/$child/status" 2> /dev/null; do sleep 0.02; done
  done
}
