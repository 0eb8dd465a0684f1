// expect: error
// complaint: FAILED: it compiles, but must not
int main() {}
