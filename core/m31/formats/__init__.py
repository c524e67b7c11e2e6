"""Number formats: encoders, decoders, layouts and transforms (MODEL.md §3).

Modules, from the element to the whole: `e2m1`, `fp8`, `e8m0` (elements and scales) · `mxfp8`, `nvfp4`, `int8`
(blocks) · `layout` (where bytes lie) · `transforms` (from one format to another, with measured loss) · `arithmetic`
(named choices of what is quantised while the model runs) · `scalar` (all of it once more in plain Python, one number
at a time: the definition that the vectorised code is tested against).

Nothing is imported here, so that `m31.formats.arithmetic` costs no torch. All functions are pure, work on any device,
and are vectorised over leading dimensions; the last dimension is K, the one that a matrix product sums over.
"""
