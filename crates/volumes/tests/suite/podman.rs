//! podman with the plugin in `volume_plugins` of containers.conf, as root and as an ordinary user.

use crate::fixture::{as_root, installed, nacre, needs, program, skip};
use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Command};

/// `$1` is a directory with `base.tar`. Everything in namespaces that end with the script.
const SETUP: &str = r#"
    set -e
    P="podman --root $PWD/root --runroot $PWD/run --storage-driver vfs --log-level error"
    RUN="$P run --network none --cgroups disabled --ulimit nofile=1024:1024 --ulimit nproc=1000:1000"
    $P import -q base.tar base:1 >/dev/null
"#;

/// What a machine must be able to do before the plugin is asked for anything.
const WITHOUT: &str = "$RUN --rm base:1 /bin/echo runs";

/// `$IN` comes before what has to run where podman of this user mounts.
const VOLUMES: &str = r#"
    begin() {
        rm -f nacre.sock pid
        $IN sh -c 'echo $$ >pid; exec nacre-volumes --state "$PWD/state" serve --socket "$PWD/nacre.sock"' 2>>log &
        for attempt in $(seq 1000); do [ -S nacre.sock ] && break; read -t 0.02 nothing || true; done </dev/zero
    }
    end() { kill -9 $(cat pid); wait || true; }
    begin
    $P volume create --driver nacre -o size=1M -o owner=0:0 limited >/dev/null
    $P volume create --driver nacre other >/dev/null
    $P volume ls -q
    echo content | $RUN --rm -i -v limited:/data base:1 /bin/sh -c 'cat >/data/file'
    $RUN --rm -v limited:/data -v other:/more base:1 /bin/sh -c 'cat /data/file
        head -c 2000000 /dev/zero >/data/full || echo full
        head -c 2000000 /dev/zero >/more/fits && echo fits; rm /data/full'
    # A container keeps its volume while the plugin is killed.
    $RUN -d -i --name lives -v limited:/data base:1 /bin/sh -c 'while true; do cat /data/file >/dev/null || echo lost; [ ! -e /data/end ] || exit 0; done' >/dev/null
    for round in 1 2 3; do
        end
        begin
        $P exec lives /bin/cat /data/file
    done
    # It may end before the command in it has.
    $P exec lives /bin/sh -c 'echo >/data/end' || true
    $P wait lives
    $P logs lives
    $P rm lives >/dev/null
    $IN grep -c "$PWD/state" /proc/self/mountinfo || true
    $P volume rm limited other >/dev/null
    end
    $IN nacre-volumes --state $PWD/state tend
    ls -A state/volumes
"#;

const EXPECTED: &str = "limited\nother\ncontent\nfull\nfits\ncontent\ncontent\ncontent\n0\n0\n";

/// An image of nothing but busybox.
fn image(place: &Path) {
    let script = "mkdir -p base/bin base/etc base/tmp base/data base/more; cp /bin/busybox base/bin/
        for name in sh cat echo head rm; do ln -s busybox base/bin/$name; done
        echo root:x:0:0:root:/root:/bin/sh >base/etc/passwd; tar -C base -cf base.tar .; rm -r base";
    assert!(Command::new("sh").args(["-ec", script]).current_dir(place).status().unwrap().success());
}

/// Runs a script with podman; returns its output, or why it failed.
fn podman(place: &Path, script: &str, rootless: bool) -> Result<String, String> {
    fs::write(
        place.join("podman.sh"),
        format!("{SETUP}\nIN={}\n{script}", if rootless { "\"$P unshare\"" } else { "" }),
    )
    .unwrap();
    fs::write(place.join("subid"), "nobody:200000:65536\n").unwrap();
    let socket = place.join("nacre.sock");
    let conf = format!("[engine]\n[engine.volume_plugins]\nnacre = \"{}\"\n", socket.display());
    fs::write(place.join("containers.conf"), conf).unwrap();
    let user = if rootless {
        "setpriv --reuid 65534 --regid 65534 --clear-groups env HOME=$PWD XDG_RUNTIME_DIR=$PWD"
    } else {
        ""
    };
    let namespaces = format!(
        "mkdir -p null; mount -t tmpfs none null; mknod -m 666 null/null c 1 3; mount --bind null/null /dev/null
         awk '$2 ~ /\\/nacre-test\\./ {{ print $2 }}' /proc/mounts | while read -r at; do [ \"$at\" = $PWD/null ] || umount -l \"$at\" 2>/dev/null || true; done
         [ -e /sys/fs/cgroup/cgroup.controllers ] || {{ umount -R /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup; }}
         touch /etc/subuid /etc/subgid; mount --bind subid /etc/subuid; mount --bind subid /etc/subgid
         {user} env CONTAINERS_CONF=$PWD/containers.conf PATH=$PWD/programs:$PATH bash podman.sh"
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]);
    let output = command.args(["sh", "-ec", &namespaces]).current_dir(place).env("LC_ALL", "C").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(said);
    }
    let log = fs::read_to_string(place.join("log")).unwrap_or_default();
    Err(format!("{said}{}{log}", String::from_utf8_lossy(&output.stderr)))
}

fn under_podman(rootless: bool) {
    needs!(as_root());
    for program in ["podman", "crun", "unshare", "busybox"] {
        needs!(installed(program));
    }
    needs!(!rootless || installed("newuidmap"));
    let place = tempfile::Builder::new().prefix("nacre-test.").tempdir().unwrap();
    let path = place.path();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    image(path);
    fs::create_dir(path.join("programs")).unwrap();
    for (from, name) in [(program(), "nacre-volumes"), (nacre(), "nacre")] {
        let to = path.join("programs").join(name);
        fs::copy(from, &to).unwrap();
        fs::set_permissions(to, fs::Permissions::from_mode(0o755)).unwrap();
    }
    if rootless {
        std::os::unix::fs::chown(path, Some(65_534), Some(65_534)).unwrap();
    }
    // What does not work without volumes cannot be asked for with some.
    if let Err(why) = podman(path, WITHOUT, rootless) {
        skip("podman", &format!("podman does not work here: {why}"));
        return;
    }
    match podman(path, VOLUMES, rootless) {
        Ok(said) => assert_eq!(said, EXPECTED),
        Err(why) => panic!("{why}"),
    }
}

#[test]
fn podman_as_root() {
    under_podman(false);
}

#[test]
fn podman_as_an_ordinary_user() {
    under_podman(true);
}
