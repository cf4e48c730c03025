// SPDX-License-Identifier: GPL-2.0
/* Configuration space: whether the device is ours and speaks our ABI, and what it says. */
#include <linux/ctype.h>
#include <linux/etherdevice.h>
#include <linux/pci.h>
#include <linux/virtio_config.h>
#include <linux/virtio_pci.h>

#include "vnicd.h"

/*
 * Reading past the end of config space is a BUG() in virtio_pci, and a foreign
 * device with our id may have a smaller one. Only virtio_pci's parent knows the length.
 */
static bool vnicd_config_present(struct virtio_device *vdev)
{
	struct pci_dev *pdev;
	int pos;

	if (!vdev->config->get)
		return false;
	if (!vdev->dev.parent || !dev_is_pci(vdev->dev.parent) || vnicd_ivshmem_is(vdev))
		return true;
	pdev = to_pci_dev(vdev->dev.parent);
	for (pos = pci_find_capability(pdev, PCI_CAP_ID_VNDR); pos;
	     pos = pci_find_next_capability(pdev, pos, PCI_CAP_ID_VNDR)) {
		u8 type;
		u32 len;

		pci_read_config_byte(pdev, pos + offsetof(struct virtio_pci_cap, cfg_type),
				     &type);
		if (type != VIRTIO_PCI_CAP_DEVICE_CFG)
			continue;
		pci_read_config_dword(pdev, pos + offsetof(struct virtio_pci_cap, length),
				      &len);
		return len >= sizeof(struct vnicd_config);
	}
	return false;
}

/* Runs before feature negotiation. */
int vnicd_validate(struct virtio_device *vdev)
{
	u32 magic, version;

	if (!virtio_has_feature(vdev, VIRTIO_F_VERSION_1)) {
		dev_err(&vdev->dev, "not a virtio 1.x device\n");
		return -ENODEV;
	}
	if (!vnicd_config_present(vdev)) {
		dev_info(&vdev->dev, "not a vnicd HCA: config space is too small\n");
		return -ENODEV;
	}
	virtio_cread_le(vdev, struct vnicd_config, magic, &magic);
	if (magic != VNICD_MAGIC) {
		dev_info(&vdev->dev, "not a vnicd HCA: magic %#x, expected %#x\n",
			 magic, VNICD_MAGIC);
		return -ENODEV;
	}
	virtio_cread_le(vdev, struct vnicd_config, abi_version, &version);
	if (version < VNICD_ABI_OLDEST || version > VNICD_ABI_VERSION) {
		dev_err(&vdev->dev,
			"the device speaks ABI version %u, this module versions %u to %u: install a guest module of a release next to that of the host's vnicd\n",
			version, VNICD_ABI_OLDEST, VNICD_ABI_VERSION);
		return -EPROTONOSUPPORT;
	}
	/* All addresses for the device are guest physical ones. */
	__virtio_clear_bit(vdev, VIRTIO_F_ACCESS_PLATFORM);
	return 0;
}

/* At least one character, all of them safe in file names and messages. */
static bool vnicd_text_ok(const char *s, bool spaces)
{
	if (!*s)
		return false;
	for (; *s; s++)
		if (!isalnum(*s) && !strchr("-_.+~", *s) && !(spaces && strchr(" ():/", *s)))
			return false;
	return true;
}

int vnicd_read_config(struct vnicd_dev *vd)
{
	struct device *dev = &vd->vdev->dev;
	struct vnicd_config cfg;

	virtio_cread_bytes(vd->vdev, 0, &cfg, sizeof(cfg));

	memcpy(vd->mac, cfg.mac, sizeof(vd->mac));
	vd->num_ceqs = le16_to_cpu(cfg.num_ceqs);
	vd->num_engines = le16_to_cpu(cfg.num_engines);
	vd->link_up = le16_to_cpu(cfg.link_up) == 1;
	vd->port_mtu = le32_to_cpu(cfg.port_mtu);
	vd->generation = le32_to_cpu(cfg.generation);

	if (!is_valid_ether_addr(vd->mac)) {
		dev_err(dev, "config space: %pM is not a usable MAC address\n", vd->mac);
		return -EINVAL;
	}
	if (!vd->num_ceqs || vd->num_ceqs > VNICD_MAX_CEQS) {
		dev_err(dev, "config space: %u completion event queues, expected 1..%u\n",
			vd->num_ceqs, VNICD_MAX_CEQS);
		return -EINVAL;
	}
	if (!vd->num_engines || vd->num_engines > VNICD_MAX_ENGINES) {
		dev_err(dev, "config space: %u engines, expected 1..%u\n",
			vd->num_engines, VNICD_MAX_ENGINES);
		return -EINVAL;
	}
	if (vd->port_mtu < 256 || vd->port_mtu > 4096) {
		dev_err(dev, "config space: path MTU %u, expected 256..4096\n", vd->port_mtu);
		return -EINVAL;
	}

	memcpy(vd->fw_version, cfg.fw_version, sizeof(cfg.fw_version));
	if (!vnicd_text_ok(vd->fw_version, true))
		strscpy(vd->fw_version, "unknown", sizeof(vd->fw_version));
	/* Use the suggested name if it is valid. */
	memcpy(vd->name, cfg.device_name, sizeof(cfg.device_name));
	if (!vnicd_text_ok(vd->name, false))
		strscpy(vd->name, "vnic%d", sizeof(vd->name));
	return 0;
}
