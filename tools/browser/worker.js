// Runs the course's Python in a worker of a page. The page sends {files} once, then {id, request}.
// A page that lies on a disk can read no files, so the page hands all of them over, as text.

const files = new Map(); // by the name for which Pyodide asks

self.onmessage = async ({ data }) => {
  try {
    if (data.files) {
      self.answer = await startPython(data.files);
      self.postMessage({ started: true });
    } else {
      self.postMessage({ id: data.id, answer: self.answer(data.request) });
    }
  } catch (error) {
    self.postMessage({ id: data.id, failure: String(error) });
  }
};

async function startPython(packed) {
  const names = Object.keys(packed);
  const unpacked = await Promise.all(names.map((name) => unpack(packed[name])));
  names.forEach((name, i) => files.set(name, unpacked[i]));
  self.fetch = answerFromFiles;
  const { loadPyodide } = await imported("pyodide.mjs");
  const { default: createPyodideModule } = await imported("pyodide.asm.mjs");
  const python = await loadPyodide({
    indexURL: "https://course.invalid/", // nobody is asked: see answerFromFiles
    createPyodideModule,
    lockFileContents: new TextDecoder().decode(files.get("pyodide-lock.json")),
  });
  python.unpackArchive(files.get("course.zip"), "zip", { extractDir: "/course" });
  files.clear();
  python.runPython('import sys; sys.path.insert(0, "/course")');
  return python.pyimport("course.browser.page").answer;
}

async function answerFromFiles(address) {
  const name = String(address).split("/").pop();
  if (!files.has(name)) throw new Error(`${name} is not in this page`);
  const type = name.endsWith(".wasm") ? "application/wasm" : "application/octet-stream";
  return new Response(files.get(name), { headers: { "Content-Type": type } });
}

function imported(name) {
  const script = new Blob([files.get(name)], { type: "text/javascript" });
  return import(URL.createObjectURL(script));
}

async function unpack(text) {
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}
