// A soft cap of scores, cap tanh(s / cap), where scores are base-2 logits already and end in weights of half precision.
#pragma once

#include "finish.cuh"

// tanh x = 1 - 2 / (1 + e^2x): two units of special functions and no division a score. Near 0 it is off by the rounding of 1,
// which is 2^-23 of the cap.
struct Cap {
    float most, rate;  // the cap in base-2 logits; of the exponent
};
// Of a cap in natural logits.
DEVICE Cap cap_of(float cap) { return Cap{cap * LOG2_E, 2.0f / cap}; }
DEVICE float capped(const Cap& cap, float s) {
    return fused(-2.0f * cap.most, reciprocal(1.0f + ex2(s * cap.rate)), cap.most);
}
