// Who pastes an error pastes the names of their own files and layers with it. No page has those, and
// a search for all words finds nothing: then the pages that have the most of them are shown.
const findAll = Search.performTermsSearch;
Search.performTermsSearch = (words, excluded) => {
  const found = findAll(words, excluded);
  if (found.length || words.size < 2) return found;
  const counts = new Map();
  for (const word of words) {
    for (const page of findAll(new Set([word]), excluded)) {
      const [, count] = counts.get(page[0]) ?? [page, 0];
      counts.set(page[0], [page, count + 1]);
    }
  }
  const most = Math.max(...[...counts.values()].map(([, count]) => count));
  return [...counts.values()].filter(([, count]) => count === most).map(([page]) => page);
};
