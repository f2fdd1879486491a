import { bytes, number, visible } from "../../core/format";
import { ancestors, folderOf, type File } from "../../core/data/tree";
import { useBounded } from "../../ui/lists/bounded";
import { Download } from "../../ui/download";
import { Empty } from "../../ui/parts";
import { setQuery } from "../../ui/router";
import { Scroll } from "../../ui/scroll";

const LARGEST = 256 << 20; // the browser keeps a download in memory

export function Tree({ volume, files, path }: { volume: string; files: readonly File[]; path: string }) {
  const { folders, files: own } = folderOf(files, path);
  const { shown, more } = useBounded(own);
  return (
    <>
      <nav class="body crumbs" aria-label="Folder">
        <ol>
          <li>
            <button type="button" class="plain" onClick={() => setQuery({ folder: "" })} disabled={path === ""}>
              {volume}
            </button>
          </li>
          {ancestors(path).map((folder) => (
            <li key={folder}>
              <button type="button" class="plain" onClick={() => setQuery({ folder })} disabled={folder === path}>
                {visible(folder.split("/").pop() ?? "")}
              </button>
            </li>
          ))}
        </ol>
      </nav>
      {folders.length + own.length === 0 ? (
        <Empty title="This folder is empty." />
      ) : (
        <Scroll label="Files">
          <table>
            <thead>
              <tr>
                <th>Name</th>
                <th class="number">Files</th>
                <th class="number">Size</th>
                <th>SHA-256</th>
                <th />
              </tr>
            </thead>
            <tbody>
              {folders.map((folder) => (
                <tr key={folder.name}>
                  <td>
                    <button type="button" class="plain" onClick={() => setQuery({ folder: path ? `${path}/${folder.name}` : folder.name })}>
                      {visible(folder.name)}/
                    </button>
                  </td>
                  <td class="number">{number(folder.files)}</td>
                  <td class="number">{bytes(folder.bytes)}</td>
                  <td />
                  <td />
                </tr>
              ))}
              {shown.map((file) => (
                <tr key={file.path}>
                  <td>{visible(file.name)}</td>
                  <td />
                  <td class="number">{bytes(file.size)}</td>
                  <td class="mono dim">{file.digest.slice(0, 12)}</td>
                  <td>
                    {file.size <= LARGEST ? (
                      <Download path={`/v1/volumes/${volume}/blobs/${file.digest}`} name={file.name} label="Download" of={file.name} />
                    ) : (
                      <code class="dim">gpufn volume get</code>
                    )}
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </Scroll>
      )}
      {more}
    </>
  );
}
