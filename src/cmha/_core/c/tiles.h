/*
How the products of matmul and of attention are cut into register tiles of up to V_TILE_ROWS rows. A tile's height is a
constant where its code is inlined, so that its accumulators are registers: one function for every height, called
through a table.

    #define STRIP(r) static void strip_##r(...) { ... }
    TILE_HEIGHTS(STRIP)                                   strip_1 ... strip_6 (AVX2)
    table[] = TILE_TABLE(strip_);  table[r - 1](...)
*/
#ifndef CMHA_TILES_H
#define CMHA_TILES_H

#include "sizes.h"

#if V_TILE_ROWS == 4
#define TILE_HEIGHTS(make) make(1) make(2) make(3) make(4)
#define TILE_TABLE(name) {name##1, name##2, name##3, name##4}
#elif V_TILE_ROWS == 6
#define TILE_HEIGHTS(make) make(1) make(2) make(3) make(4) make(5) make(6)
#define TILE_TABLE(name) {name##1, name##2, name##3, name##4, name##5, name##6}
#else
#define TILE_HEIGHTS(make) make(1) make(2) make(3) make(4) make(5) make(6) make(7) make(8)
#define TILE_TABLE(name) {name##1, name##2, name##3, name##4, name##5, name##6, name##7, name##8}
#endif

/* Rows of the next tile of `left` rows; the last two tiles share what is left, as a tile of one row is slow. */
INLINE ptrdiff_t tile_rows(ptrdiff_t left) {
    return left >= 2 * V_TILE_ROWS ? V_TILE_ROWS : left > V_TILE_ROWS ? (left + 1) / 2 : left;
}
#endif
