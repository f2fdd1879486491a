/** A folder of a list of files. Pure. */

export interface File {
  readonly path: string;
  readonly size: number;
  readonly digest: string;
}

export interface Folder {
  readonly folders: readonly { readonly name: string; readonly files: number; readonly bytes: number }[];
  readonly files: readonly (File & { readonly name: string })[];
}

/** The folders and files directly in `path`; "" is the root. */
export function folderOf(files: readonly File[], path: string): Folder {
  const prefix = path ? `${path}/` : "";
  const folders = new Map<string, { files: number; bytes: number }>();
  const own: (File & { name: string })[] = [];
  for (const file of files) {
    if (!file.path.startsWith(prefix)) {
      continue;
    }
    const rest = file.path.slice(prefix.length);
    const slash = rest.indexOf("/");
    if (slash < 0) {
      own.push({ ...file, name: rest });
    } else {
      const name = rest.slice(0, slash);
      const before = folders.get(name) ?? { files: 0, bytes: 0 };
      folders.set(name, { files: before.files + 1, bytes: before.bytes + file.size });
    }
  }
  const byName = (a: { name: string }, b: { name: string }): number => a.name.localeCompare(b.name);
  return { folders: [...folders.entries()].map(([name, sum]) => ({ name, ...sum })).sort(byName), files: own.sort(byName) };
}

/** The folders above a path, from the root: ["a", "a/b"] of "a/b". */
export function ancestors(path: string): string[] {
  const parts = path ? path.split("/") : [];
  return parts.map((_, index) => parts.slice(0, index + 1).join("/"));
}
