import type { Volume } from "../../api/records";
import { useResource } from "../../api/resource";
import { bytes, number } from "../../core/format";
import { BoundedTable } from "../../ui/lists/bounded-table";
import { Ago, Empty, ErrorBox, Loading, Panel } from "../../ui/parts";
import { Link } from "../../ui/router";

export default function VolumesPage() {
  const { data, problem } = useResource<{ volumes: readonly Volume[] }>("/v1/volumes");
  return (
    <div class="page">
      <div class="title">
        <h1>Volumes</h1>
        <span class="dim">named, versioned trees of files</span>
      </div>
      {problem ? <ErrorBox error={problem} /> : null}
      {data === null ? (
        problem ? null : <Loading what="the volumes" />
      ) : (
        <Panel title="Volumes">
          <Table volumes={data.volumes} />
        </Panel>
      )}
    </div>
  );
}

function Table({ volumes }: { volumes: readonly Volume[] }) {
  return (
    <BoundedTable
      label="Volumes"
      rows={volumes}
      empty={
        <Empty title="There is no volume.">
          <pre>gpufn volume put NAME FOLDER</pre>
        </Empty>
      }
      head={
        <>
          <th>Volume</th>
          <th class="number">Newest version</th>
          <th class="number">Files</th>
          <th class="number">Size</th>
          <th class="number">Versions kept</th>
          <th class="number">Stored</th>
          <th>Changed</th>
        </>
      }
    >
      {(volume) => <Row key={volume.name} volume={volume} />}
    </BoundedTable>
  );
}

function Row({ volume }: { volume: Volume }) {
  const newest = volume.versions[volume.versions.length - 1];
  return (
    <tr>
      <td>
        <Link to={`/volumes/${volume.name}`}>{volume.name}</Link>
      </td>
      <td class="number">{number(newest?.number)}</td>
      <td class="number">{number(newest?.files)}</td>
      <td class="number">{bytes(newest?.bytes)}</td>
      <td class="number">{number(volume.versions.length)}</td>
      <td class="number">{bytes(volume.stored_bytes)}</td>
      <td>
        <Ago at={newest?.created_at} />
      </td>
    </tr>
  );
}
