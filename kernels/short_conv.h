// Short causal depthwise convolution over time, with an optional SiLU:
//   u_t[c] = act( sum_{j<W} w[c, 0, j] * x_{t-(W-1)+j}[c] ),      the last tap multiplies the current token.
// Inputs before a document's first token come from `initial` when given, and are 0 otherwise. W from 1 to 4.
#pragma once

#include "kernels/documents.h"
#include "kernels/stream.h"

namespace palimpsest {

enum class ConvActivation : uint8_t { kNone, kSilu };

// y, x [N, C] (rows may be spaced); w [C, 1, W] f32 (f64 for f64), as dw; initial [states, W-1, C] or absent: in row
// Documents::entering() the inputs just before a document's first token, oldest first. y overwritten.
PALIMPSEST_OP(short_conv_forward, Stream& stream, Tensor y, const Tensor& x, const Tensor& w, const Tensor& initial,
              const Documents& documents, ConvActivation activation);
// dx [N, C] overwritten; dw [C, 1, W] accumulated; d_initial as initial, its rows overwritten, or absent. d_final
// [states, W-1, C] or absent is the gradient of short_conv_final_state's output; it is added into dx (and d_initial).
// The convolution before the activation is recomputed from x.
PALIMPSEST_OP(short_conv_backward, Stream& stream, Tensor dx, Tensor dw, Tensor d_initial, const Tensor& dy,
              const Tensor& x, const Tensor& w, const Tensor& initial, const Tensor& d_final,
              const Documents& documents, ConvActivation activation);
// final [states, W-1, C]: the last W-1 inputs of every document, in row Documents::leaving() (reaching into `initial`,
// or zeros, when a document is shorter), to carry on later. Overwritten; `final_state` may be `initial` where every
// document enters and leaves by the same row.
PALIMPSEST_OP(short_conv_final_state, Stream& stream, Tensor final_state, const Tensor& x, const Tensor& initial,
              const Documents& documents);

}  // namespace palimpsest
