// What tests of the page's Markdown do in the page: each function is called by its name.

globalThis.ran = [];
globalThis.pwned = () => ran.push('a script');

// Shows a text in an element of its own.
globalThis.shown = (source, live) => {
  const element = made('div', { class: 'text' });
  log.replaceChildren(made('li', { class: 'assistant' }, element));
  new Markdown(element).set(source, live);
  return element;
};

// Scripts that ran, and nodes, attributes and addresses that no text may become.
globalThis.unsafe = (element) => {
  const tags = ('P H2 H3 H4 H5 H6 HR UL OL LI BLOCKQUOTE DIV TABLE THEAD TBODY TR TH TD PRE CODE SPAN'
    + ' BUTTON EM STRONG DEL BR A SUP DETAILS SUMMARY TEXTAREA LABEL SMALL MATH MROW MI MN MO MTEXT'
    + ' MSPACE MFRAC MSQRT MROOT MSUB MSUP MSUBSUP MUNDER MOVER MUNDEROVER MTABLE MTR MTD').split(' ');
  const names = ('class tabindex role type href title target rel start aria-label aria-busy'
    + ' aria-current placeholder rows readonly alttext display stretchy fence largeop accent width'
    + ' linethickness mathvariant').split(' ');
  const wrong = [...globalThis.ran];
  for (const e of element.querySelectorAll('*')) {
    if (!tags.includes(e.tagName.toUpperCase())) wrong.push(e.tagName);
    for (const { name, value } of e.attributes) {
      if (!names.includes(name)) wrong.push(`${e.tagName} ${name}`);
      if (name === 'href' && !/^https?:/.test(value)) wrong.push(value);
    }
  }
  return wrong;
};

// Whether a text that grows becomes what it is at once; blocks that lost their node, and all.
globalThis.growsAsWhole = (source) => {
  const [element, first] = [made('div'), []];
  const markdown = new Markdown(element);
  for (let end = 0; end < source.length; end += 3) {
    markdown.set(source.slice(0, end), true);
    if (shown(source.slice(0, end), true).innerHTML !== element.innerHTML) return end;
    const { childNodes } = element;
    if (childNodes.length > first.length + 1) first.push(childNodes[first.length]);
  }
  markdown.set(source);
  const kept = first.filter((node, i) => node === element.childNodes[i]).length;
  return [element.innerHTML === shown(source).innerHTML, first.length - kept, first.length];
};

// How long a text takes to be shown.
globalThis.timeOfShowing = (text) => Math.min(...[1, 2, 3].map(() => {
  const start = performance.now();
  shown(text);
  return performance.now() - start;
}));

// The time that a piece at the end of a long text takes, in ms: that of the fastest quarter, since the
// machine may do something else meanwhile.
globalThis.timeOfPiece = (text) => {
  const element = made('div', { class: 'text' });
  log.replaceChildren(made('li', { class: 'assistant' }, element));
  const [markdown, times] = [new Markdown(element), []];
  for (let end = text.length - 700; end < text.length; end += 7) {
    const start = performance.now();
    scrolled(() => markdown.set(text.slice(0, end), true));
    times.push(performance.now() - start);
  }
  return times.sort((a, b) => a - b)[times.length >> 1];
};

// Whether code that grows keeps its node, and its text.
globalThis.codeThatGrows = () => {
  const markdown = new Markdown(made('div'));
  markdown.set('```py\nfirst', true);
  const code = markdown.element.querySelector('code');
  markdown.set('```py\nfirst\nsecond\n```\n');
  return [code === markdown.element.querySelector('code'), code.textContent];
};

// Answers and conversations behind an import, and what is unsafe of them.
globalThis.afterImport = async (whole) => {
  await importFiles([new File([whole], 'talk.json')]);
  showError(whole);
  notice(whole);
  await new Promise((done) => setTimeout(done, 200));
  return [log.querySelectorAll('.assistant').length, shelf.list.size, unsafe(log),
    unsafe(find('chat-list')), unsafe(find('notices'))];
};

// Of the page, of what is wider than its column, and of the window.
globalThis.widthsOf = (text) => {
  const width = shown(text).getBoundingClientRect().right + 1;
  const wide = [...log.querySelectorAll('*')].filter((e) => !e.closest('.table, pre')
    && e.getBoundingClientRect().right > width);
  const pre = log.querySelectorAll('pre')[1];
  return [document.documentElement.scrollWidth, wide.length,
    getComputedStyle(pre).overflowX, window.innerWidth];
};
