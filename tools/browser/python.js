// The course's Python for a page: python.ask({do: ..., ...}) gives what course/browser/page.py
// returns. Nothing is loaded before the first question.

const python = (() => {
  const folder = new URL(".", document.currentScript.src);
  const python = { ask, limit: 10_000 }; // milliseconds for an answer; then Python is started anew
  let worker; // a promise of one that has started
  let waiting; // the question under way, {id, done, failed}
  let line = Promise.resolve(); // questions are asked one after the other
  let number = 0;

  function ask(question) {
    const answer = line.then(() => askNow(question));
    line = answer.catch(() => {});
    return answer;
  }

  async function askNow(question) {
    worker ??= start();
    const asked = await worker.catch((error) => {
      worker = undefined;
      throw error;
    });
    const id = ++number;
    return new Promise((resolve, reject) => {
      const clock = setTimeout(() => {
        asked.terminate();
        worker = undefined;
        reject(new Error(`Python had no answer within ${python.limit / 1000} s and was ended. ` +
          "Does a loop never end?"));
      }, python.limit);
      waiting = {
        id,
        done: (text) => (clearTimeout(clock), resolve(JSON.parse(text))),
        failed: (text) => (clearTimeout(clock), reject(new Error(text))),
      };
      asked.postMessage({ id, request: JSON.stringify(question) });
    });
  }

  async function start() {
    await Promise.all(["runtime.js", "course.js"].map(load));
    const code = globalThis.pythonWorker;
    const module = `data:text/javascript;charset=utf-8,${encodeURIComponent(code)}`;
    try {
      return await startIn(new Worker(module, { type: "module" }));
    } catch {
      // A classic worker, of which Pyodide must not notice that it is one.
      const classic = `self.importScripts = () => { throw new Error("none"); };\n${code}`;
      const address = URL.createObjectURL(new Blob([classic], { type: "text/javascript" }));
      return startIn(new Worker(address));
    }
  }

  function startIn(made) {
    return new Promise((resolve, reject) => {
      made.onerror = (event) => reject(new Error(event.message || "the worker does not start"));
      made.onmessage = ({ data }) => {
        if (data.started) resolve(made);
        else if (data.id === undefined) reject(new Error(data.failure));
        else if (data.id === waiting?.id && data.failure) waiting.failed(data.failure);
        else if (data.id === waiting?.id) waiting.done(data.answer);
      };
      made.postMessage({ files: globalThis.pythonFiles });
    });
  }

  const loaded = {};
  function load(name) {
    loaded[name] ??= new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = new URL(name, folder);
      script.onload = resolve;
      script.onerror = () => reject(new Error(`${name} is missing beside the pages`));
      document.head.append(script);
    });
    return loaded[name];
  }

  return python;
})();
