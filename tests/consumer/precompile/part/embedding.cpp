#include <cstdio>

long embedded(int width);

int main() { std::printf("embedded: %ld numbers\n", embedded(4)); }
