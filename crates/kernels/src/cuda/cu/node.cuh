// A node of a row's tree: the softmax state of some leaves, for one query vector and four columns of its value.
#pragma once

#include "finish.cuh"

struct Floats {
    float x, y, z, w;
};
DEVICE Floats floats_at(const float* at) {
    U4 v = load16(at);
    return Floats{bits_float(v.x), bits_float(v.y), bits_float(v.z), bits_float(v.w)};
}
DEVICE Floats sum_of_two(const Floats& a, const Floats& b) {
    return Floats{a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}
struct Node {
    float m, l;
    Floats acc;
};

// a fa + b fb, rounded the same way wherever it is compiled.
DEVICE float both(float a, float fa, float b, float fb) { return fused(a, fa, b * fb); }
// Joins the state of the keys right of `a`'s. Empty states are identities; one whose sum is NaN is not empty.
DEVICE Node joined(const Node& a, const Node& b) {
    if (b.m == -infinity() && b.l == b.l) return a;
    if (a.m == -infinity() && a.l == a.l) return b;
    float m = most(a.m, b.m), reference = m == -infinity() ? 0.0f : m;
    float fa = ex2(a.m - reference), fb = ex2(b.m - reference);
    return Node{m, both(a.l, fa, b.l, fb),
                Floats{both(a.acc.x, fa, b.acc.x, fb), both(a.acc.y, fa, b.acc.y, fb), both(a.acc.z, fa, b.acc.z, fb),
                       both(a.acc.w, fa, b.acc.w, fb)}};
}

// What the left and the right of two nodes are multiplied by when they are joined; the left one's largest logit becomes the join's.
// An empty node, of -inf and zeros, changes nothing but the sign of a zero.
struct Meeting {
    float left, right;
};
DEVICE Meeting meet(float& m, float right) {
    float top = most(m, right), reference = top == -infinity() ? 0.0f : top;
    Meeting r{ex2(m - reference), ex2(right - reference)};
    m = top;
    return r;
}
DEVICE void meet(Node& a, const Node& b) {
    const Meeting with = meet(a.m, b.m);
    a.l = both(a.l, with.left, b.l, with.right);
    a.acc = Floats{both(a.acc.x, with.left, b.acc.x, with.right), both(a.acc.y, with.left, b.acc.y, with.right),
                   both(a.acc.z, with.left, b.acc.z, with.right), both(a.acc.w, with.left, b.acc.w, with.right)};
}
