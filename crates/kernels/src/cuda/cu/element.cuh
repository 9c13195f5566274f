// What query vectors and what they are held against are made of, of two bytes. Define: Q_TYPE.
#pragma once
#include "ptx.cuh"

#if Q_TYPE == 1
typedef Bf16 Element;
#elif Q_TYPE == 2
typedef F16 Element;
#else
#error "Q_TYPE is 1 (bf16) or 2 (f16)"
#endif
