/* C: compiled without the header. */
int in_c(void) { return 0; }
