"use strict";
// The arithmetic of scores.py.
const Z = 1.959963984540054;

function wilson(right, n) {
  const share = right / n, shrink = 1 + Z * Z / n, middle = (share + Z * Z / (2 * n)) / shrink;
  const half = Z * Math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n)) / shrink;
  return [right === 0 ? 0 : Math.max(0, middle - half), right === n ? 1 : Math.min(1, middle + half)];
}

function accuracy(items) {
  const graded = items.filter(item => item.correct != null), n = graded.length, categories = new Map();
  if (!n) return null;
  for (const { category, correct } of graded) {
    const [right, count] = categories.get(category) || [0, 0];
    categories.set(category, [right + correct, count + 1]);
  }
  const shares = [...categories.values()].map(([right, count]) => [right / count, count]), k = shares.length;
  const value = shares.reduce((sum, [share]) => sum + share, 0) / k;
  const variance = shares.reduce((sum, [share, count]) => sum + share * (1 - share) / count, 0) / k ** 2;
  if (k === 1 || variance === 0) return { value, n, interval: wilson([...categories.values()].reduce((sum, [right]) => sum + right, 0), n) };
  const half = Z * Math.sqrt(variance);
  return { value, n, interval: [Math.max(0, value - half), Math.min(1, value + half)] };
}

function bitsPerByte(items) {
  const sizes = items.filter(item => item.nats != null && item.size != null);
  const total = sizes.reduce((sum, item) => sum + item.size, 0), n = sizes.length;
  if (!total) return null;
  const bits = item => item.nats / Math.LN2;
  const value = sizes.reduce((sum, item) => sum + bits(item), 0) / total;
  if (n === 1) return { value, n, interval: null };
  const squares = sizes.reduce((sum, item) => sum + (bits(item) - value * item.size) ** 2, 0);
  const half = Z * Math.sqrt(n / (n - 1) * squares) / total;
  return { value, n, interval: [value - half, value + half] };
}
