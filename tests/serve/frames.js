// Appends 100 pieces of a text a second, for 3 s, to an answer that begins with another one. Returns
// the median ms of a frame's scripting and layout, and frames a second.
async ([before, more]) => {
  const answer = new Answer(), took = [], draw = answer.draw.bind(answer);
  const take = (content) => answer.take({ choices: [{ delta: { content } }] });
  const later = (ms) => new Promise((done) => setTimeout(done, ms));
  log.append(answer.item);
  if (before) take(before);
  await later(500);
  answer.draw = () => {
    const start = performance.now();
    draw();
    document.body.getBoundingClientRect();
    took.push(performance.now() - start);
  };
  const start = performance.now();
  let [frames, count] = [0, 0];
  const frame = () => { frames += 1; if (count < 300) requestAnimationFrame(frame); };
  requestAnimationFrame(frame);
  for (; count < 300; await later(4)) {
    for (; count < (performance.now() - start) / 10; count += 1) {
      const at = 3 * count % more.length;
      take(more.slice(at, at + 3));
    }
  }
  const fps = 1000 * frames / (performance.now() - start);
  answer.item.remove();
  return { median: took.sort((a, b) => a - b)[took.length >> 1], drawn: took.length, fps };
}
