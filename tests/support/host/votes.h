// What threads.h lacks of votes, and of arithmetic that block lists are made with.
#include "arithmetic.h"

using std::abs;
inline unsigned __ballot_sync(unsigned, bool value) {
  unsigned voted;
  of_warp(&value, &voted, [](const void** all, void** to) {
    unsigned lanes = 0;
    for (int i = 0; i < 32; ++i) lanes |= static_cast<unsigned>(*static_cast<const bool*>(all[i])) << i;
    for (int i = 0; i < 32; ++i) *static_cast<unsigned*>(to[i]) = lanes;
  });
  return voted;
}
inline bool __any_sync(unsigned lanes, bool value) { return __ballot_sync(lanes, value) != 0; }
inline bool __syncthreads_or(bool value) {
  static bool any;
  __syncthreads();  // everyone has read the result before
  any = false;
  __syncthreads();
  any |= value;
  __syncthreads();
  return any;
}
